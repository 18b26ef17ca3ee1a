"""Requests to the slot engine, its emissions, and the state of a running request."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.generation.sampling import Sampling, draw
from holdfast.generation.text_stream import TextStream
from holdfast.system.errors import HoldfastError, UsageError

FinishReason = Literal["stop", "length", "cancelled"]


MAX_LOGPROBS = 100
# Random numbers that a request draws at first; it draws more when it needs them.
FIRST_DRAWS = 256


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and how to continue it."""

    prompt: tuple[int, ...]
    """Token ids; an empty prompt starts from the end-of-document token."""
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 1234
    """Together with the position it decides every draw."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many likeliest tokens."""
    sliding_window: bool = False
    """Where the positions end, continue from the newest half of them; unset: the text ends there."""
    text_seconds: float = 0.0
    """Shortest time between two pieces of text: 0 reports text with every token, infinity all of it at the end."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {self.max_new_tokens}: give 1 or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UsageError(f"logprobs {self.logprobs}: give 0 to {MAX_LOGPROBS}")
        if any(not stop for stop in self.stop):
            raise UsageError("a stop string is empty; leave it out")

    def check(self, positions: int, vocabulary: int) -> None:
        """Raises if a model with so many positions and tokens cannot serve the request."""
        if len(self.prompt) >= positions and not self.sliding_window:
            raise HoldfastError(
                f"the prompt has {len(self.prompt)} tokens, but the model's positions end at {positions}; shorten it"
            )
        if self.prompt and not 0 <= min(self.prompt) <= max(self.prompt) < vocabulary:
            raise HoldfastError(f"the prompt has token ids outside of the model's vocabulary of {vocabulary:,}")


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the model's own distribution, before temperature and the other sampling parameters."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The likeliest token ids, likeliest first."""

    @staticmethod
    def of_row(lists: Sequence[Sequence[Any]], row: int, wanted: int | None) -> "Logprobs | None":
        """One row of `likeliest` (sampling.py), as lists; None if nothing is wanted."""
        if not lists or wanted is None:
            return None
        chosen, ids, values = lists
        return Logprobs(chosen[row], tuple(zip(ids[row][:wanted], values[row][:wanted], strict=True)))


@dataclass(frozen=True)
class Emission:
    """A token of a request, the text that became certain with it, or the request's end."""

    id: int
    token: int | None
    """None if nothing but text or the end is reported: the end-of-document token is not part of a text."""
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class RunningRequest:
    """A request from its submission to its end: what has been written, and how many tokens the device was asked for."""

    def __init__(self, id: int, request: GenerationRequest, stream: TextStream, context: list[int], limit: int) -> None:
        self.id, self.request, self.limit = id, request, limit
        self.tokens: list[int] = []
        self.set_context(context)
        self.launched = 0
        """Tokens that were launched; with lookahead one more than `tokens` holds."""
        self.position = 0
        """Where the next step writes the newest token."""
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._draws: list[float] = []

    def set_context(self, tokens: list[int]) -> None:
        """The tokens that are read when the request gets a slot, in place of all before them."""
        self.context, self._before = tokens, len(self.tokens)

    @property
    def in_slot(self) -> list[int]:
        """The tokens of the slot's positions, and the newest one."""
        return self.context + self.tokens[self._before :]

    def next_draws(self, count: int) -> list[float]:
        """The numbers for the next tokens; zeros for a greedy request."""
        last = self.launched + count
        if self.request.sampling.temperature > 0 and last > len(self._draws):
            self._draws = draw(self.request.seed, max(FIRST_DRAWS, 2 * last)).tolist()  # begins with the same numbers
        found = self._draws[self.launched : self.launched + count]
        return found + [0.0] * (count - len(found))

    def receive(self, token: int, logprobs: Logprobs | None, ends: Collection[int]) -> Emission:
        """Adds a token; returns what to report. `ends`: tokens that end the text and are no part of it."""
        if token in ends:
            return self.end("stop")
        self.tokens.append(token)
        text = self._stream.add(token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
            text += self._stream.finish()
        if self._stream.stopped:
            self.finish_reason = "stop"
        return Emission(self.id, token, text, logprobs, self.finish_reason)

    def end(self, reason: FinishReason) -> Emission:
        """Ends the request without a token."""
        self.finish_reason = reason
        return Emission(self.id, None, self._stream.finish(), None, reason)
