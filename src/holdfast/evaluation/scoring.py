"""Log-probabilities of given continuations: one forward pass over each, batched by length.

Shapes: B sequences, T tokens, H hidden, N scored tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.generation.loading import LoadedModel
from holdfast.generation.model_step import padded_positions
from holdfast.system.errors import HoldfastError

# Tokens of one forward pass, padding included, and rows of logits that exist at once.
BATCH_TOKENS = {"cuda": 65536, "cpu": 4096}
LOGIT_ROWS = 2048


@dataclass(frozen=True)
class Pair:
    """Tokens that are given, at least one, and tokens whose probability is asked for."""

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class Score:
    """Natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest one."""

    logprob: float
    greedy: bool


@torch.no_grad()
def score(
    loaded: LoadedModel, pairs: Sequence[Pair], advance: Callable[[int], None] = lambda pairs: None
) -> list[Score]:
    """The score of each pair, in order. A pair longer than the model's positions loses the beginning of its context.

    `advance` is called with the number of pairs after each forward pass.
    """
    scores: list[Score | None] = [None] * len(pairs)
    limit = loaded.max_positions
    longest = max((len(pair.continuation) for pair in pairs), default=0)
    if longest > limit:
        raise HoldfastError(f"a continuation has {longest:,} tokens, but the model's positions end at {limit:,}")
    largest = max((token for pair in pairs for token in (*pair.context, *pair.continuation)), default=0)
    if largest >= loaded.model.vocab_size:
        raise HoldfastError(
            f"a text holds the token {largest}, but the model has only {loaded.model.vocab_size:,} tokens: leave the text out"
        )
    for batch in _batches(pairs, limit, BATCH_TOKENS[loaded.device.type]):
        for index, result in zip(batch, _score_batch(loaded, [pairs[index] for index in batch], limit), strict=True):
            scores[index] = result
        advance(len(batch))
    return [result for result in scores if result is not None]


def windows(tokens: Sequence[int], prefix: int, limit: int) -> Iterator[Pair]:
    """Windows that score each token once, as lm-evaluation-harness cuts them.

    The first token is predicted from `prefix`. Every other window is given the token before it; the last one, which is
    shorter, as many tokens before it as the model's positions allow.
    """
    for start in range(0, len(tokens), limit):
        end = min(start + limit, len(tokens))
        yield Pair(tokens[end - limit - 1 : start] if start else [prefix], tokens[start:end])


def _batches(pairs: Sequence[Pair], limit: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices of pairs of similar length, the longest first: a batch that does not fit in memory fails at once."""
    lengths = [min(len(pair.context) + len(pair.continuation) - 1, limit) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda index: -lengths[index])
    while order:
        rows = max(1, batch_tokens // max(1, lengths[order[0]]))
        yield order[:rows]
        order = order[rows:]


def _score_batch(loaded: LoadedModel, pairs: Sequence[Pair], limit: int) -> list[Score]:
    inputs = [[*pair.context, *pair.continuation][-limit - 1 : -1] for pair in pairs]
    longest = max(len(row) for row in inputs)
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in inputs], device=loaded.device)
    ends = torch.tensor([len(row) - 1 for row in inputs], device=loaded.device)
    hidden_BTH = loaded.model.hidden(padded, padded_positions(loaded.model, padded, ends))
    # Position t predicts token t + 1: the last positions of a row predict its continuation.
    scored_NH = torch.cat(
        [hidden_BTH[row, len(tokens) - len(pair.continuation) : len(tokens)]
         for row, (tokens, pair) in enumerate(zip(inputs, pairs, strict=True))]
    )  # fmt: skip
    targets_N = torch.tensor([token for pair in pairs for token in pair.continuation], device=loaded.device)
    logprobs_N, greedy_N = _token_scores(loaded, scored_NH, targets_N)
    lengths = [len(pair.continuation) for pair in pairs]
    return [
        Score(float(logprobs.sum()), bool(greedy.all()))
        for logprobs, greedy in zip(logprobs_N.cpu().split(lengths), greedy_N.cpu().split(lengths), strict=True)
    ]


def _token_scores(loaded: LoadedModel, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, greedy = [], []
    for rows, targets in zip(hidden_NH.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
        logits = loaded.model.logits(rows).float()
        logprobs.append(logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1).double())
        greedy.append(logits.argmax(-1) == targets)
    return torch.cat(logprobs), torch.cat(greedy)
