"""BERT training samples out of a sentence-level `.bin/.idx` pair: sentence pairs, masked when they are read.

Sample i depends on the data, the settings, `seed` and i, and on nothing else: every choice is a counter's word for (seed, i).
Shapes, special tokens and names are those of megatron-core's BERT dataset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from holdfast.data.indexed import IndexedDataset
from holdfast.data.samples.bert_index import MappingRules, build_bert_index
from holdfast.data.samples.blend import BlendedSamples, build_splits
from holdfast.data.samples.index_cache import index_folder, open_index, sample_identity
from holdfast.data.samples.masking import Masking, mask_tokens
from holdfast.data.samples.stateless_random import random_words, uniform
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers import Tokenizer

PAIR, TRIM = 4, 5  # purposes of the random words
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BertVocabulary:
    """The part of a tokenizer that the samples need."""

    size: int
    cls: int
    sep: int
    mask: int
    pad: int
    continues: npt.NDArray[np.bool_]
    """[size]: whether a token continues a word (`##...`)."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "BertVocabulary":
        special = {"cls": tokenizer.cls, "sep": tokenizer.sep, "mask": tokenizer.mask, "pad": tokenizer.pad}
        ids = {name: number for name, number in special.items() if number is not None}
        if len(ids) < len(special):
            missing = ", ".join(f"[{name.upper()}]" for name in special if name not in ids)
            raise UsageError(
                f"the tokenizer has no {missing}: BERT needs one of type BertWordPieceLowerCase or BertWordPieceCase"
            )
        continues = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        model = orjson.loads(tokenizer.recipe.definition)["model"]
        if model["type"] == "WordPiece":
            prefix = model.get("continuing_subword_prefix", "##")
            continues[[number for token, number in model["vocab"].items() if token.startswith(prefix)]] = True
        return cls(size=tokenizer.vocab_size, continues=continues, **ids)


@dataclass(frozen=True)
class BertRules:
    """What a sample looks like, besides its length."""

    masking: Masking = field(default_factory=Masking)
    short_seq_prob: float = 0.1
    binary_head: bool = True
    """Samples are pairs of segments; otherwise a single one."""
    sentence_order: bool = False
    """Half of the pairs are swapped, as in Megatron; otherwise half of them have a second segment of another document."""


class BertSamples:
    """`samples[i]` is a dictionary of int64 arrays of `seq_length`: text, types, labels, padding_mask, loss_mask; and the
    numbers is_random (what the binary head predicts) and truncated.

    `labels` is -1 where nothing is to be predicted; `loss_mask` is 1 where something is.
    """

    def __init__(
        self,
        data: IndexedDataset | Path | str,
        documents: range | None = None,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocabulary: BertVocabulary,
        rules: BertRules | None = None,
        cache_dir: Path | str | None = None,
        name: str = "train",
    ) -> None:
        self.data = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self.seq_length, self.seed, self.vocabulary, self.rules = seq_length, seed, vocabulary, rules or BertRules()
        documents = range(self.data.document_count) if documents is None else documents
        self.document_ends = np.array(self.data.document_indices[documents.start : documents.stop + 1], dtype=np.int64)
        self._check(documents, name)
        settings = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        settings |= {"short_seq_prob": self.rules.short_seq_prob, "binary_head": self.rules.binary_head}  # type: ignore[dict-item]
        self.identity: dict[str, Any] = sample_identity(self.data.prefix, documents, **settings)

        def build(folder: Path) -> None:
            least = 2 if self.rules.binary_head else 1
            mapping = MappingRules(seq_length - SPECIAL_TOKENS, self.rules.short_seq_prob, least, seed)
            build_bert_index(folder, self.data.sequence_lengths, self.document_ends, num_samples, mapping)

        folder = index_folder(self.data.prefix, cache_dir)
        self.mapping = open_index(folder, f"bert-{name}", self.identity, build)["mapping"]

    def _check(self, documents: range, name: str) -> None:
        if not len(documents):
            raise HoldfastError(
                f"{self.data.prefix}: none of its {self.data.document_count:,} documents is left for the {name} split: "
                f"change --split, or use more data"
            )
        if (
            self.rules.binary_head
            and not self.rules.sentence_order
            and np.count_nonzero(np.diff(self.document_ends)) < 2
        ):
            raise HoldfastError(
                f"{self.data.prefix}: the {name} split needs two documents with text, to take second segments from another one; "
                f"change --split, or set bert_sentence_order"
            )

    @property
    def max_predictions(self) -> int:
        """No sample has more tokens to predict."""
        return self.rules.masking.most(self.seq_length - SPECIAL_TOKENS)

    def __len__(self) -> int:
        return len(self.mapping)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first, end, target = self.mapping[index].tolist()
        a, b, is_random = self._segments(index, first, end, target)
        a, b, truncated = trim_pair(a, b, target, self.seed, index)
        words = self.vocabulary
        pieces: list[npt.ArrayLike] = [[words.cls], a, [words.sep], b, [words.sep]]
        tokens: Tokens = np.concatenate(pieces if len(b) else pieces[:3], dtype=np.int64)
        special = np.zeros(len(tokens), dtype=np.bool_)
        special[[0, len(a) + 1, -1]] = True
        seen, chosen = mask_tokens(
            tokens, ~special, words.continues[tokens], self.rules.masking, words.mask, words.size, self.seed, index
        )
        return {
            **self._padded(tokens, seen, chosen, len(a)),
            "is_random": int(is_random),
            "truncated": int(truncated),
        }

    def _segments(self, index: int, first: int, end: int, target: int) -> tuple[Tokens, Tokens, bool]:
        """The two segments, and whether the second is not what follows the first."""
        if not self.rules.binary_head:
            return self._sentences(first, end), np.empty(0, dtype=np.int64), False
        pivot_draw, random_draw, sentence_draw = uniform(random_words(self.seed, PAIR, index, 3))[0].tolist()
        pivot = first + 1 + int(pivot_draw * (end - first - 1))
        a, is_random = self._sentences(first, pivot), random_draw < 0.5
        if not is_random:
            return a, self._sentences(pivot, end), False
        if self.rules.sentence_order:
            return self._sentences(pivot, end), a, True
        return a, self._elsewhere(sentence_draw, first, max(1, target - len(a))), True

    def _elsewhere(self, draw: float, sentence: int, wanted: int) -> Tokens:
        """`wanted` tokens or more from a random sentence on, of any document but that of `sentence`."""
        ends = self.document_ends
        own = int(np.searchsorted(ends, sentence, side="right"))
        begin, end = int(ends[own - 1]), int(ends[own])
        start = int(ends[0]) + int(draw * (int(ends[-1] - ends[0]) - (end - begin)))
        if start >= begin:
            start += end - begin
        limit = int(ends[np.searchsorted(ends, start, side="right")])
        stop, tokens = start, 0
        while stop < limit and tokens < wanted:
            tokens += int(self.data.sequence_lengths[stop])
            stop += 1
        return self._sentences(start, stop)

    def _sentences(self, begin: int, end: int) -> Tokens:
        return np.concatenate([self.data[number] for number in range(begin, end)]).astype(np.int64)

    def _padded(self, tokens: Tokens, seen: Tokens, chosen: Tokens, length_a: int) -> dict[str, Tokens]:
        length, filled = self.seq_length, len(tokens)
        text = np.full(length, self.vocabulary.pad, dtype=np.int64)
        text[:filled] = seen
        types = np.zeros(length, dtype=np.int64)
        types[length_a + 2 : filled] = 1
        labels = np.full(length, -1, dtype=np.int64)
        labels[chosen] = tokens[chosen]
        padding_mask = np.zeros(length, dtype=np.int64)
        padding_mask[:filled] = 1
        loss_mask = np.zeros(length, dtype=np.int64)
        loss_mask[chosen] = 1
        return {"text": text, "types": types, "labels": labels, "padding_mask": padding_mask, "loss_mask": loss_mask}


def trim_pair(a: Tokens, b: Tokens, target: int, seed: int, sample: int) -> tuple[Tokens, Tokens, bool]:
    """Takes tokens off the longer segment until both fit, each from the front or the back by the toss of a coin."""
    excess = len(a) + len(b) - target
    if excess <= 0:
        return a, b, False
    # First the longer one comes down to the other, then they take turns, the second one first.
    apart = min(excess, abs(len(a) - len(b)))
    turns = excess - apart
    from_a = turns // 2 + (apart if len(a) > len(b) else 0)
    coins = random_words(seed, TRIM, sample, excess)[0] & np.uint64(1)
    front_a, front_b = int(coins[:from_a].sum()), int(coins[from_a:].sum())
    from_b = excess - from_a
    return a[front_a : len(a) - (from_a - front_a)], b[front_b : len(b) - (from_b - front_b)], True


def build_bert_splits(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    seed: int,
    samples: tuple[int | None, int | None, int | None],
    vocabulary: BertVocabulary,
    rules: BertRules | None = None,
    cache_dir: Path | str | None = None,
) -> tuple[BertSamples | BlendedSamples | None, ...]:
    """Training, validation and test samples: see `build_splits`. Splits are cut between documents."""

    def make(data: IndexedDataset, documents: range, number: int | None, name: str) -> BertSamples:
        shape = {"seq_length": seq_length, "seed": seed}
        text = {"vocabulary": vocabulary, "rules": rules, "cache_dir": cache_dir}
        return BertSamples(data, documents, num_samples=number, **shape, **text, name=name)  # type: ignore[arg-type]

    return build_splits(data_path, split, samples, make, lambda data: data.document_count, cache_dir)
