"""Masked-LM targets: which tokens of a sample are to be predicted, and what the model sees in their place.

As BERT and Megatron have it: about `probability` of the tokens are chosen; of these 80% become [MASK], 10% a random token, 10%
stay. Words may be masked whole, and runs of up to `max_ngrams` words together (a run of n is drawn with weight 1/n). Megatron
rounds the number of choices down, here it is rounded at random, so that the share is the asked one for any length.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.data.samples.stateless_random import random_words, uniform

CHOOSE, RUN_LENGTH, REPLACE = 2, 6, 3  # purposes of the random words
MASKED, RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """How tokens are masked."""

    probability: float = 0.15
    whole_word: bool = False
    max_ngrams: int = 1

    def most(self, maskable: int) -> int:
        """No sample with so many maskable tokens has more to predict."""
        return max(1, math.ceil(self.probability * maskable))


def mask_tokens(
    tokens: npt.NDArray[np.int64],
    maskable: npt.NDArray[np.bool_],
    continues: npt.NDArray[np.bool_],
    masking: Masking,
    mask_id: int,
    vocab_size: int,
    seed: int,
    sample: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What the model sees, and the positions it has to predict. `continues` marks the pieces that continue a word."""
    places = np.flatnonzero(maskable)
    chosen = places[_choose(_word_starts(continues[places], masking.whole_word), len(places), masking, seed, sample)]
    draws = uniform(random_words(seed, REPLACE, sample, 2 * len(chosen)))[0].reshape(2, -1)
    seen = tokens.copy()
    random_tokens = (draws[1] * vocab_size).astype(np.int64)
    replaced = np.where(draws[0] < MASKED, mask_id, random_tokens)
    seen[chosen] = np.where(draws[0] < MASKED + RANDOM, replaced, tokens[chosen])
    return seen, chosen


def _word_starts(continues: npt.NDArray[np.bool_], whole_word: bool) -> npt.NDArray[np.int64]:
    if not whole_word:
        return np.arange(len(continues))
    starts = ~continues
    starts[:1] = True
    return np.flatnonzero(starts)


def _choose(
    starts: npt.NDArray[np.int64], count: int, masking: Masking, seed: int, sample: int
) -> npt.NDArray[np.int64]:
    """Indices of the chosen ones among `count` maskable tokens, rising: words in random order, as long as they fit."""
    words = len(starts)
    if not words:
        return np.empty(0, dtype=np.int64)
    draws = random_words(seed, CHOOSE, sample, words + 1)[0]
    wanted = count * masking.probability
    limit = max(1, int(wanted) + bool(uniform(draws[-1:])[0] < wanted % 1))
    order = np.argsort(draws[:words])
    if words == count and masking.max_ngrams == 1:
        return np.sort(order[:limit])  # what the loop below comes to when every word is one token
    runs = _run_lengths(words, masking.max_ngrams, seed, sample)
    edges = [*starts.tolist(), count]
    taken: set[int] = set()
    for word in order.tolist():
        if len(taken) >= limit:
            break
        run = min(runs[word], words - word)
        # A run that is too long is shortened; if its first word alone is too long, the next candidate is tried.
        while run and edges[word + run] - edges[word] > limit - len(taken):
            run -= 1
        indices = range(edges[word], edges[word + run])
        if taken.isdisjoint(indices):
            taken.update(indices)
    return np.array(sorted(taken), dtype=np.int64)


def _run_lengths(words: int, longest: int, seed: int, sample: int) -> list[int]:
    """How many words are masked together from each word on: n with weight 1/n."""
    weights = np.cumsum(1.0 / np.arange(1, longest + 1))
    draws = uniform(random_words(seed, RUN_LENGTH, sample, words))[0]
    lengths: list[int] = (1 + np.searchsorted(weights, draws * weights[-1], side="right")).tolist()
    return lengths
