"""Errors of the HTTP interface, in the shape that OpenAI's clients read."""

from typing import Any


class ApiError(Exception):
    """A request that the server refuses: HTTP status, message, and the parameter at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        named = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
        return named.get(self.status, {})


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong (400)."""
    return ApiError(400, message, param=param, code=code)
