"""GPT training samples: runs of `seq_length + 1` tokens out of a `.bin/.idx` pair, in Megatron's order.

Sample i depends on the data, the split, the number of samples asked for, `seq_length` and `seed`, and on nothing else: not on
the number of ranks, nor on what was read before. Only NumPy is needed here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.data.indexed import IndexedDataset
from holdfast.data.samples.blend import Samples, build_splits
from holdfast.data.samples.gpt_index import build_gpt_index, plan_epochs
from holdfast.data.samples.index_cache import index_folder, open_index, sample_identity
from holdfast.data.samples.packed import PackedSamples
from holdfast.system.errors import HoldfastError

# check_token_range reads this many stretches of this many tokens: at most 16 MB of int32 tokens.
CHECKED_STRETCHES = 64
CHECKED_TOKENS = 65536


class GPTSamples:
    """`samples[i]` is an int64 array of `seq_length + 1` tokens; inputs are all but the last, labels all but the first.

    `documents` is the range of documents to draw from (default: all of them), `num_samples` how many samples are needed at
    least (None: what one epoch holds); more of them means more epochs. The index lies in `cache_dir`, by default beside the data.
    """

    def __init__(
        self,
        data: IndexedDataset | Path | str,
        documents: range | None = None,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache_dir: Path | str | None = None,
        name: str = "train",
    ) -> None:
        self.data = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self.seq_length = seq_length
        lengths = self.data.sequence_lengths
        documents = range(len(lengths)) if documents is None else documents
        tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
        if tokens == 0 or (num_samples is None and tokens <= seq_length):
            raise HoldfastError(
                f"{self.data.prefix}: {tokens:,} tokens in {len(documents):,} of {len(lengths):,} documents are too few for "
                f"a {name} split with samples of {seq_length} tokens: change --split, or use more data"
            )
        epochs = plan_epochs(tokens, seq_length, num_samples)
        self.epochs = epochs.count
        settings = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        self.identity: dict[str, Any] = sample_identity(self.data.prefix, documents, **settings)

        def build(folder: Path) -> None:
            # A copy in memory: the mapped lengths are read in random order, and start at an odd address.
            build_gpt_index(folder, np.array(lengths), documents, epochs, seq_length, seed)

        arrays = open_index(index_folder(self.data.prefix, cache_dir), f"gpt-{name}", self.identity, build)
        self.document_index, self.sample_index = arrays["document"], arrays["sample"]
        self.shuffle_index = arrays["shuffle"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        position = int(self.shuffle_index[index])
        (first, begin), (last, _) = self.sample_index[position : position + 2].tolist()
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for document in self.document_index[first : last + 1].tolist():
            part = self.data[document][begin : begin + len(sample) - filled]
            sample[filled : filled + len(part)] = part
            filled, begin = filled + len(part), 0
        assert filled == len(sample)
        return sample


def build_gpt_splits(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    seed: int,
    samples: tuple[int | None, int | None, int | None],
    cache_dir: Path | str | None = None,
    packed: bool = False,
) -> tuple[Samples | None, ...]:
    """Training, validation and test samples: see `build_splits`. `packed`: whole documents (--packing best-fit) instead of runs
    of tokens."""
    kind = PackedSamples if packed else GPTSamples

    def make(data: IndexedDataset, documents: range, number: int | None, name: str) -> Samples:
        shape = {"seq_length": seq_length, "seed": seed}
        return kind(data, documents, num_samples=number, **shape, cache_dir=cache_dir, name=name)

    return build_splits(data_path, split, samples, make, lambda data: len(data.sequence_lengths), cache_dir)


def check_token_range(data: IndexedDataset, vocab_size: int) -> int:
    """Raises if a token id does not fit the vocabulary; returns how many tokens were looked at.

    Up to four million tokens are looked at: all of them in a small dataset, otherwise 64 stretches of 65,536 tokens spread
    evenly from the first token to the last. It finds data made with another tokenizer, not a single stray id.
    """
    tokens = data.tokens
    if len(tokens) <= CHECKED_STRETCHES * CHECKED_TOKENS:
        starts = np.arange(0, len(tokens), CHECKED_TOKENS)
    else:
        starts = np.linspace(0, len(tokens) - CHECKED_TOKENS, CHECKED_STRETCHES).astype(np.int64)
    checked = 0
    for start in starts.tolist():
        stretch = tokens[start : start + CHECKED_TOKENS]
        checked += len(stretch)
        for wrong in (int(stretch.max()), int(stretch.min())):
            if not 0 <= wrong < vocab_size:
                raise HoldfastError(
                    f"{data.prefix} holds token id {wrong}, but the vocabulary has {vocab_size} tokens: "
                    f"use the tokenizer that the data was made with, or set vocab_size"
                )
    return checked
