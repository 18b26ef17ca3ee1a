"""GPT samples of whole documents (--packing best-fit): `seq_length + 1` tokens, padded at the end.

Each epoch holds every token of every document once; documents longer than a sample are cut into pieces. Epoch e is decided by the
data, the split, `seq_length`, `seed` and e alone: a longer run does not change its earlier epochs. All epochs have the same
plan of lengths; which of the documents of one length go where, and the order of the samples, are drawn for each.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.data.indexed import IndexedDataset
from holdfast.data.samples.blend import BlendedSamples
from holdfast.data.samples.index_cache import index_folder, open_index, sample_identity
from holdfast.data.samples.packing import cut_documents, pack
from holdfast.system.errors import HoldfastError

PADDING_TOKEN = 0
PADDING_DOCUMENT = -1


class PackedSamples:
    """`samples[i]` is int64 [2, seq_length + 1]: tokens, and the number of each token's document in the sample (-1: padding).

    The arguments are those of GPTSamples. `padding_share` is the share of the samples' tokens that are padding.
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
        self.capacity = seq_length + 1
        lengths = self.data.sequence_lengths
        documents = range(len(lengths)) if documents is None else documents
        tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
        if tokens == 0:
            raise HoldfastError(
                f"{self.data.prefix}: the {len(documents):,} documents of the {name} split are empty: "
                f"change --split, or use more data"
            )
        settings = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed, "packing": "best-fit"}
        self.identity: dict[str, Any] = sample_identity(self.data.prefix, documents, **settings)

        def build(folder: Path) -> None:
            build_packed_index(folder, np.array(lengths), documents, num_samples, self.capacity, seed)

        arrays = open_index(index_folder(self.data.prefix, cache_dir), f"gpt-best-fit-{name}", self.identity, build)
        self.piece_index, self.order_index = arrays["piece"], arrays["order"]
        self.sample_index, self.shuffle_index = arrays["sample"], arrays["shuffle"]
        self.padding_share = 1 - tokens / (self.shuffle_index.shape[1] * self.capacity)

    @property
    def epochs(self) -> int:
        return len(self.shuffle_index)

    def __len__(self) -> int:
        return self.shuffle_index.size

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        epoch, number = divmod(index, self.shuffle_index.shape[1])
        position = int(self.shuffle_index[epoch, number])
        first, last = self.sample_index[position : position + 2].tolist()
        pieces = self.piece_index[self.order_index[epoch, first:last]].tolist()
        sample = np.empty((2, self.capacity), dtype=np.int64)
        filled = 0
        for document, (sequence, begin) in enumerate(pieces):
            part = self.data[sequence][begin : begin + self.capacity]
            sample[0, filled : filled + len(part)] = part
            sample[1, filled : filled + len(part)] = document
            filled += len(part)
        sample[:, filled:] = [[PADDING_TOKEN], [PADDING_DOCUMENT]]
        return sample


def build_packed_index(
    folder: Path, lengths: npt.NDArray[np.int32], documents: range, num_samples: int | None, capacity: int, seed: int
) -> None:
    """Writes `piece.npy`, `sample.npy`, `order.npy` and `shuffle.npy` into `folder`, for at least `num_samples` samples."""
    pieces, sizes = cut_documents(lengths, documents, capacity)
    np.save(folder / "piece.npy", pieces)
    sample_of, samples = pack(np.bincount(sizes, minlength=2), capacity)
    dtype = sample_of.dtype
    starts = np.zeros(samples + 1, dtype)
    np.cumsum(np.bincount(sample_of, minlength=samples), out=starts[1:])
    np.save(folder / "sample.npy", starts)
    slots = np.argsort(sample_of, kind="stable")
    del sample_of, pieces
    # From long to short; keys of two bytes are sorted in linear time.
    keys = (capacity - sizes).astype(np.uint16 if capacity <= np.iinfo(np.uint16).max else np.int32)
    epochs = 1 if num_samples is None else max(1, -(-num_samples // samples))
    order = np.lib.format.open_memmap(folder / "order.npy", mode="w+", dtype=dtype, shape=(epochs, len(slots)))
    shuffle = np.lib.format.open_memmap(folder / "shuffle.npy", mode="w+", dtype=dtype, shape=(epochs, samples))
    for epoch in range(epochs):
        random = np.random.RandomState([seed, epoch])
        shuffled = np.arange(len(slots), dtype=dtype)
        random.shuffle(shuffled)
        order[epoch] = shuffled[np.argsort(keys[shuffled], kind="stable")][slots]
        numbers = np.arange(samples, dtype=dtype)
        random.shuffle(numbers)
        shuffle[epoch] = numbers
    order.flush()
    shuffle.flush()


def padding_share(samples: Any) -> float | None:
    """The share of padding in packed samples, or in a blend of them (whose parts are of one kind); None for other samples."""
    if isinstance(samples, PackedSamples):
        return float(samples.padding_share)
    if isinstance(samples, BlendedSamples):
        shares = [share for part in samples.parts if (share := padding_share(part)) is not None]
        return float(np.average(shares, weights=samples.drawn)) if shares else None
    return None
