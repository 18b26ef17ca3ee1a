"""Text while its tokens arrive: whole characters only, and nothing that may become a stop string.

The invariant: the pieces, joined, are the decoded tokens, cut before the first stop string.
"""

import time
from collections.abc import Callable, Sequence

# What a decoder writes for bytes that are not (yet) a character.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that are decoded again at each step, at most about twice as many; those before them no longer change the text.
WINDOW = 16


class TextStream:
    """Decodes one sequence token by token. `held_tokens` are byte tokens, which later byte tokens may still change.

    `seconds`: shortest time between two pieces of text, infinite for all of it at the end; decoding many tokens at once takes
    the time of one. A stream with stop strings decodes every token.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        held_tokens: frozenset[int] = frozenset(),
        seconds: float = 0.0,
    ) -> None:
        self._decode, self._stop, self._held_tokens = decode, tuple(stop), held_tokens
        self._tokens: list[int] = []
        self._decoded = 0
        """Characters of the window's text that are in `_waiting` or were returned."""
        self._waiting = ""
        """Text that may be the start of a stop string."""
        self.stopped = False
        self._seconds = 0.0 if stop else seconds
        self._due = seconds if self._seconds == float("inf") else 0.0
        """When to decode next, on the clock of time.monotonic."""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        if self._seconds:
            now = time.monotonic()
            if now < self._due:
                return ""
            self._due = now + self._seconds
        if token in self._held_tokens:
            return ""
        text = self._decode(self._tokens)
        certain = text.rstrip(INCOMPLETE)
        self._waiting += certain[self._decoded :]
        self._decoded = max(self._decoded, len(certain))
        if len(certain) == len(text):
            self._narrow(text)
        return self._release(final=False)

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        self._waiting += self._decode(self._tokens)[self._decoded :] if self._tokens else ""
        return self._release(final=True)

    def _narrow(self, text: str) -> None:
        """Drops old tokens if those that remain decode to the end of the text."""
        if len(self._tokens) < 2 * WINDOW or any(token in self._held_tokens for token in self._tokens[-WINDOW - 1 :]):
            return
        rest = self._decode(self._tokens[-WINDOW:])
        if rest and not rest.startswith(INCOMPLETE) and text.endswith(rest):
            self._tokens = self._tokens[-WINDOW:]
            self._decoded = len(rest)

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        ends = [place for place in (self._waiting.find(stop) for stop in self._stop) if place >= 0]
        if ends:
            self.stopped = True
            return self._waiting[: min(ends)]
        held = 0 if final else max((_overlap(self._waiting, stop) for stop in self._stop), default=0)
        released = self._waiting[: len(self._waiting) - held]
        self._waiting = self._waiting[len(released) :]
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string starts with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
