"""NAME=VALUE, as flags give it."""

from collections.abc import Sequence

from holdfast.system.errors import UsageError


def pairs(flag: str, given: Sequence[str]) -> list[tuple[str, str]]:
    """Names and values; a value may be empty or hold further equal signs."""
    found = []
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name or any(c.isspace() for c in name):
            raise UsageError(f"{flag} '{pair}' is not NAME=VALUE")
        found.append((name, value))
    return found
