"""Access control: ASGI middleware that checks every HTTP request before its route handles it.

- The key: `Authorization: Bearer KEY` for /v1/ and /metrics where the server has one.
- The Host header, where there is no key: an address, localhost, or a name that the user allows. This stops DNS
  rebinding: a web page whose own name resolves to this machine sends that name.
- The Origin header: requests from pages of other sites are refused, also those whose response the page could not read.
- The size of the body, and the time that it may take to arrive.
"""

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.serve.api_errors import ApiError

MAX_BODY_BYTES = 4 << 20
BODY_SECONDS = 30.0


class Access:
    def __init__(
        self, app: ASGIApp, api_key: str | None, allowed_hosts: Collection[str], count: Callable[[int], None]
    ) -> None:
        """`count` is called with the status of each refused request."""
        self._app, self._hosts, self._count = app, {host.lower() for host in allowed_hosts}, count
        self._digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check(scope["path"], headers)
            except ApiError as error:
                self._count(error.status)
                await error_response(error)(scope, receive, send)
                return
            receive = _Body(receive).receive
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._digest is None and not self._is_allowed(_hostname(host)):
            raise ApiError(403, "this host name is not allowed; start the server with --allowed-host NAME to allow it")
        origin = headers.get("origin")
        if (origin is not None and _network_location(origin) != host) or headers.get("sec-fetch-site") == "cross-site":
            raise ApiError(403, "requests from pages of other sites are refused")
        if self._digest is not None and (path.startswith("/v1/") or path == "/metrics"):
            kind, _, key = headers.get("authorization", "").partition(" ")
            # Digests have one length: the comparison takes the same time for every key.
            given = hashlib.sha256(key.strip().encode("latin-1")).digest()
            if not hmac.compare_digest(given, self._digest) or kind.lower() != "bearer":
                raise ApiError(401, "give the server's key: Authorization: Bearer KEY", code="invalid_api_key")

        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            raise _too_large()

    def _is_allowed(self, name: str) -> bool:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts or name == "localhost"
        return True


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _network_location(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def error_response(error: ApiError) -> Response:
    return Response(orjson.dumps(error.body()), error.status, error.headers(), "application/json")


class _Body:
    """The messages of a request, with a limit on the bytes and the time of its body."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._bytes, self._complete = receive, 0, False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
        self._bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._bytes > MAX_BODY_BYTES:
            raise _too_large()
        return message
