"""Lossless speculation: a cheap guess of the next tokens, checked by the model in one pass.

A token is a function of the model's logits and of the number that its position draws (sampling.py). So the check needs no second
random number: a guess is accepted where it equals the token that the model itself chooses there. The text is the same, token for
token, as without speculation, greedy and sampled (up to rounding, since one pass reads several tokens at a time). A draft model
draws with the numbers of the positions too, and so often guesses right at any temperature.

Shapes: B slots, T tokens of one pass, V vocabulary.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.generation.cache import ALIGNMENT, SlotCache
from holdfast.generation.loading import LoadedModel, load_model
from holdfast.generation.model_step import choose_step, feed, read_prompts
from holdfast.generation.requests import Logprobs, RunningRequest
from holdfast.generation.sampling import SamplingRows, Steps, likeliest, next_tokens
from holdfast.models.gpt import GPT
from holdfast.system.errors import HoldfastError, UsageError

NGRAM = "ngram"
# Tokens that are guessed for one pass of the model.
GUESSES = 4
# An n-gram of the text that is looked up in the text before it: longest and shortest.
LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2


@dataclass(frozen=True)
class SlotText:
    """What a slot holds, for a proposer."""

    slot: int
    request: RunningRequest

    @property
    def tokens(self) -> list[int]:
        """The tokens of the slot's positions, from position 0."""
        return self.request.in_slot


class Proposer(Protocol):
    def propose(self, texts: Sequence[SlotText], count: int, sampling: SamplingRows) -> list[list[int]]:
        """For each text up to `count` tokens that may follow it."""


class NgramProposer:
    """Guesses the tokens that followed the last earlier occurrence of the newest tokens."""

    def propose(self, texts: Sequence[SlotText], count: int, sampling: SamplingRows) -> list[list[int]]:
        return [self._continue(text.tokens, count) for text in texts]

    @staticmethod
    def _continue(tokens: list[int], count: int) -> list[int]:
        text = array("I", tokens).tobytes()
        width = len(text) // len(tokens)
        for size in range(min(LONGEST_NGRAM, len(tokens) - 1), SHORTEST_NGRAM - 1, -1):
            newest, place = text[-size * width :], len(text) - size * width
            while (place := text.rfind(newest, 0, place + size * width - 1)) > 0 and place % width:
                pass  # found across the border of two tokens
            if place >= 0:
                after = place // width + size
                return tokens[after : after + count]
        return []


class DraftProposer:
    """Guesses with a smaller model, which has slots of its own.

    The invariant: the draft's cache holds the keys and values of the tokens `_cached[slot]`, from position 0.
    """

    def __init__(self, draft: LoadedModel, slots: int, length: int) -> None:
        self._model, self._length = draft.model, min(length, draft.max_positions)
        self._step = choose_step(draft.model)
        self._cache = SlotCache(draft.model.config, slots, self._length, draft.model.dtype, draft.device)
        self._cached: dict[int, list[int]] = {}

    def propose(self, texts: Sequence[SlotText], count: int, sampling: SamplingRows) -> list[list[int]]:
        fitting = [text for text in texts if len(text.tokens) + count <= self._length]
        if not fitting:
            return [[] for _ in texts]
        self._catch_up(fitting)
        slots = [text.slot for text in fitting]
        guessed = dict(zip(slots, self._guess(fitting, count, sampling), strict=True))
        # The last guess was not fed. The other slots were fed zeros, or have no text.
        self._cached = {text.slot: text.tokens + guessed[text.slot][:-1] for text in fitting}
        return [guessed.get(text.slot, []) for text in texts]

    def _catch_up(self, texts: Sequence[SlotText]) -> None:
        """Reads the texts that the cache does not hold up to their newest two tokens, which are fed in any case."""
        behind = [text for text in texts if self._cached.get(text.slot, [])[: len(text.tokens) - 2] != text.tokens[:-2]]
        if behind:
            read_prompts(self._model, [t.tokens[:-1] for t in behind], [[t.slot] for t in behind], self._cache)

    def _guess(self, texts: Sequence[SlotText], count: int, sampling: SamplingRows) -> list[list[int]]:
        device = self._cache.keys_NBGSD.device
        rows = max(text.slot for text in texts) + 1
        newest, positions = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        draws = torch.zeros(rows, count, dtype=torch.float64)
        for text in texts:
            newest[text.slot] = torch.tensor(text.tokens[-2:])
            positions[text.slot] = len(text.tokens) - 2
            draws[text.slot] = torch.tensor(text.request.next_draws(count), dtype=torch.float64)
        newest, positions, draws = newest.to(device), positions.to(device), draws.to(device)
        span = min(-(-(max(len(text.tokens) for text in texts) + count) // ALIGNMENT) * ALIGNMENT, self._cache.length)
        steps = Steps.of([text.request.request.sampling for text in texts])
        logits = feed(self._model, newest, positions, self._cache, span)[:, -1]
        positions = positions + 1
        guesses: list[Tensor] = []
        for number in range(count):
            if number:
                positions = (positions + 1).clamp(max=self._length - 1)
                logits = self._step(guesses[-1], positions, self._cache, span)
            guesses.append(next_tokens(logits, sampling.rows(slice(0, rows)), steps, draws[:, number]))
        found = torch.stack(guesses, dim=1).tolist()
        return [found[text.slot] for text in texts]


def check_guesses(
    model: GPT,
    cache: SlotCache,
    span: int,
    texts: Sequence[SlotText],
    guesses: Sequence[Sequence[int]],
    sampling: SamplingRows,
    steps: Steps,
    alternatives: int | None,
) -> list[list[tuple[int, Logprobs | None]]]:
    """The tokens that each text goes on with: the guesses that the model confirms, and the token that it chooses after them.

    `sampling` has the rows of the slots from 0 to the last one in use.
    """
    device = cache.keys_NBGSD.device
    shape = (max(text.slot for text in texts) + 1, 1 + max(map(len, guesses)))
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64)
    draws = torch.zeros(shape, dtype=torch.float64)
    for text, guess in zip(texts, guesses, strict=True):
        tokens[text.slot, : 1 + len(guess)] = torch.tensor([text.tokens[-1], *guess])
        positions[text.slot] = text.request.position
        draws[text.slot] = torch.tensor(text.request.next_draws(shape[1]), dtype=torch.float64)
    tokens, draws = tokens.to(device), draws.to(device)
    logits = feed(model, tokens, positions.to(device), cache, span)
    choices = _choices(logits, tokens, sampling, steps, draws)
    lists: list[Any] = []
    if alternatives is not None:
        lists = [part.tolist() for part in likeliest(logits.flatten(0, 1), choices.flatten(), alternatives)]
    chosen = choices.tolist()
    found = []
    for text, guess in zip(texts, guesses, strict=True):
        own = chosen[text.slot]
        count = next((number for number, token in enumerate(guess) if token != own[number]), len(guess)) + 1
        first, wanted = text.slot * shape[1], text.request.request.logprobs
        found.append([(own[number], Logprobs.of_row(lists, first + number, wanted)) for number in range(count)])
    return found


def _choices(logits_BTV: Tensor, tokens_BT: Tensor, sampling: SamplingRows, steps: Steps, draws_BT: Tensor) -> Tensor:
    """The model's own choice (B, T) after each of the tokens."""
    chosen = []
    for number in range(logits_BTV.shape[1]):
        if (
            steps.penalty and number and sampling.seen_BV is not None
        ):  # the penalty counts the guesses before this place
            sampling.seen_BV = sampling.seen_BV.scatter(1, tokens_BT[:, number : number + 1], True)
        chosen.append(next_tokens(logits_BTV[:, number], sampling, steps, draws_BT[:, number]))
    return torch.stack(chosen, dim=1)


def load_draft(speculate: str | Path, loaded: LoadedModel) -> LoadedModel:
    """The draft model at a path, if it has the tokenizer of the model."""
    draft = load_model(speculate, dtype=loaded.model.dtype, device=loaded.device)
    if draft.tokenizer.recipe.digest != loaded.tokenizer.recipe.digest:
        raise HoldfastError(
            f"the draft model {speculate} has another tokenizer than the model; choose one with the same tokenizer"
        )
    return draft


def build_proposer(speculate: str | Path | LoadedModel, loaded: LoadedModel, slots: int, length: int) -> Proposer:
    """`ngram`, or a draft model (loaded, or by its path) with the same tokenizer."""
    if loaded.weights is not None:
        raise UsageError(
            f"speculation checks with the model's own weights, not with {loaded.weights}; use one of the two"
        )
    if speculate == NGRAM:
        return NgramProposer()
    draft = speculate if isinstance(speculate, LoadedModel) else load_draft(speculate, loaded)
    if draft.model.vocab_size != loaded.model.vocab_size:
        raise HoldfastError(
            f"the draft model's vocabulary has {draft.model.vocab_size:,} tokens, the model's {loaded.model.vocab_size:,}; "
            "they must be equal"
        )
    return DraftProposer(draft, slots, length)
