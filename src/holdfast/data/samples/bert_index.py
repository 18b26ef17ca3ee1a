"""Which sentences make a BERT sample: Megatron's mapping of (first sentence, end, target length), in NumPy.

A sample takes sentences of one document until it has its target length, and never leaves a single sentence over. The target is
`max_tokens`, or with the short-sequence probability a random shorter one, drawn by (seed, epoch, first sentence). Documents are
walked side by side: a step finds the next sample of every document that is not used up. Megatron draws its targets and its
order from other generators, so the samples are the same in kind, not one by one; with no short sequences their set is the same.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.data.samples.stateless_random import random_words, uniform
from holdfast.system.errors import HoldfastError

# Documents with a sentence longer than this are left out, as in Megatron: it is no sentence.
LONG_SENTENCE = 512
# Sentences whose lengths are added up at once.
CHUNK = 1 << 22
TARGET = 1  # purpose of the random words

Mapping = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MappingRules:
    """How sentences are gathered to samples."""

    max_tokens: int
    short_seq_prob: float
    least_sentences: int
    seed: int


def build_bert_index(
    folder: Path,
    lengths: npt.NDArray[np.int32],
    document_ends: npt.NDArray[np.int64],
    num_samples: int | None,
    rules: MappingRules,
) -> None:
    """Writes `mapping.npy`: whole epochs until there are `num_samples` (None: one), shuffled over all of them."""
    epochs: list[Mapping] = []
    while not epochs or sum(map(len, epochs)) < (num_samples or 0):
        epochs.append(map_epoch(lengths, document_ends, len(epochs), rules))
        if not len(epochs[0]):
            raise HoldfastError(
                f"none of {len(document_ends) - 1:,} documents makes a BERT sample: each needs {rules.least_sentences} "
                f"sentences or more, none over {LONG_SENTENCE} tokens; was the data made with --split-sentences?"
            )
    mapping = np.concatenate(epochs)
    order = np.arange(len(mapping), dtype=np.int64)
    np.random.RandomState(rules.seed).shuffle(order)
    small = int(mapping.max()) <= np.iinfo(np.uint32).max
    np.save(folder / "mapping.npy", mapping[order].astype(np.uint32 if small else np.uint64))


def map_epoch(
    lengths: npt.NDArray[np.int32], document_ends: npt.NDArray[np.int64], epoch: int, rules: MappingRules
) -> Mapping:
    """The samples [n, 3] of one epoch, in the order of their sentences."""
    parts: list[Mapping] = []
    begin = 0
    while begin < len(document_ends) - 1:
        # As many whole documents as fit the chunk, and one at least.
        end = int(np.searchsorted(document_ends, document_ends[begin] + CHUNK, side="right")) - 1
        end = max(end, begin + 1)
        edges = document_ends[begin : end + 1]
        first = int(edges[0])
        parts.append(_map_documents(np.array(lengths[first : int(edges[-1])]), edges - first, first, epoch, rules))
        begin = end
    return np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int64)


def _map_documents(
    lengths: npt.NDArray[np.int32], edges: npt.NDArray[np.int64], first: int, epoch: int, rules: MappingRules
) -> Mapping:
    tokens_before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    long_before = np.concatenate([[0], np.cumsum(lengths > LONG_SENTENCE, dtype=np.int64)])
    start, end = edges[:-1], edges[1:]
    # Megatron does not look for long sentences in documents of one sentence.
    too_long = (end - start > 1) & (long_before[end] > long_before[start])
    usable = (end - start >= rules.least_sentences) & ~too_long
    start, end = start[usable], end[usable]
    found: list[Mapping] = []
    while len(start):
        target = target_lengths(epoch, start + first, rules)
        stop = np.searchsorted(tokens_before, tokens_before[start] + target, side="left")
        stop = np.maximum(stop, start + rules.least_sentences)
        stop = np.where(stop <= end - 2, stop, end)
        found.append(np.stack([start + first, stop + first, target], axis=1))
        start, end = stop[stop < end], end[stop < end]
    mapping = np.concatenate(found) if found else np.empty((0, 3), dtype=np.int64)
    return mapping[np.argsort(mapping[:, 0])]


def target_lengths(epoch: int, sentences: npt.NDArray[np.int64], rules: MappingRules) -> npt.NDArray[np.int64]:
    """`max_tokens`, or for a share of the samples anything from 2 tokens up to it."""
    draws = uniform(random_words(rules.seed + (epoch << 32), TARGET, sentences, 2))
    short = 2 + (draws[:, 1] * (rules.max_tokens - 1)).astype(np.int64)
    return np.where(draws[:, 0] < rules.short_seq_prob, short, rules.max_tokens)
