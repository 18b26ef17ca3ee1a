"""Typed access to the fields of a JSON request: a wrong type or range is a 400 that names the parameter.

A field that is null counts as absent, as OpenAI's clients send it. `finish` refuses fields that were not read: a misspelt
parameter must not be ignored.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

import orjson

from holdfast.serve.api_errors import invalid

# Parameters of OpenAI that do not change the text.
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "prediction", "reasoning_effort", "verbosity"),
)


class Fields:
    """The fields of one request."""

    def __init__(self, body: bytes) -> None:
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise invalid(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise invalid("the body must be a JSON object")
        self._values: dict[str, Any] = {name: item for name, item in value.items() if item is not None}
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        self._known.add(name)
        return self._values.pop(name, None)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name} must be true or false", name)
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name} must be a string", name)
        return default if value is None else value

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(f"{name} must be an integer", name)
        if not least <= value <= most:
            raise invalid(f"{name} is {value}; give {least:,} to {most:,}", name)
        return value

    def number(self, name: str, default: float, least: float, most: float, *, above: bool = False) -> float:
        """`above`: the least value itself is refused."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise invalid(f"{name} must be a number", name)
        if not least <= value <= most or (above and value == least):
            raise invalid(f"{name} is {value}; give {'more than ' if above else ''}{least:g} to {most:g}", name)
        return float(value)

    def unsupported(self, names: Iterable[str]) -> None:
        """Refuses parameters that this server does not implement, unless their value switches them off."""
        for name in names:
            if self.take(name) not in (None, False, 0, "", [], {}, "none", {"type": "text"}):
                raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")

    def finish(self) -> None:
        for name in IGNORED:
            self._values.pop(name, None)
        for name in self._values:
            near = difflib.get_close_matches(name[:64], self._known, n=1)
            hint = f"; perhaps you meant {near[0]}" if near else ""
            raise invalid(f"unknown parameter: {name[:64]!r}{hint}", name[:64], "unknown_parameter")
