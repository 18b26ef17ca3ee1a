"""The order of GPT samples: Megatron's document, sample and shuffle indices, in NumPy alone.

Documents are shuffled and laid end to end for as many epochs as the samples need; sample j covers the `seq_length + 1` tokens
from position `j × seq_length` of that line (the last token of one sample is the first of the next); then the samples are
shuffled. All of it comes from one RandomState(seed), drawn in Megatron's order, so that the indices equal megatron-core's
element by element and type by type.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# A last epoch of which less than this share is used is shuffled apart, so that its documents do not crowd out the others.
FINAL_EPOCH_THRESHOLD = 0.80
# Documents whose lengths are added up at once: 32 MB of positions, whatever the size of the data.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Epochs:
    """How often the documents are gone through, and how the last time is treated."""

    count: int
    samples: int
    samples_before_final: int
    """Samples that do not reach into the last epoch; all of them unless `final_is_separate`."""
    final_is_separate: bool


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> Epochs:
    """Epochs for at least `num_samples` samples; None asks for what one epoch holds."""
    assert tokens_per_epoch > 0
    count = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    samples = (count * tokens_per_epoch - 1) // seq_length
    if num_samples is None or count == 1:
        return Epochs(count, samples, samples, False)
    before_final = ((count - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = num_samples - before_final < int(FINAL_EPOCH_THRESHOLD * per_epoch)
    return Epochs(count, samples, before_final if separate else samples, separate)


def build_gpt_index(
    folder: Path, lengths: npt.NDArray[np.int32], documents: range, epochs: Epochs, seq_length: int, seed: int
) -> None:
    """Writes `document.npy`, `sample.npy` and `shuffle.npy` into `folder`."""
    random = np.random.RandomState(seed)
    document_index = order_documents(documents, epochs, random)
    np.save(folder / "document.npy", document_index)
    widest = max(len(document_index), int(lengths.max(initial=0)))
    sample_index = np.lib.format.open_memmap(
        folder / "sample.npy",
        mode="w+",
        dtype=np.int32 if widest <= np.iinfo(np.int32).max else np.int64,
        shape=(epochs.samples + 1, 2),
    )
    locate_samples(sample_index, lengths, document_index, seq_length)
    sample_index.flush()
    del document_index
    np.save(folder / "shuffle.npy", order_samples(epochs, random))


def order_documents(documents: range, epochs: Epochs, random: np.random.RandomState) -> npt.NDArray[np.int32]:
    """Every document once per epoch, shuffled; a separate last epoch is shuffled by itself."""
    index = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs.count)
    first = (epochs.count - epochs.final_is_separate) * len(documents)
    random.shuffle(index[:first])
    if epochs.final_is_separate:
        random.shuffle(index[first:])
    return index


def locate_samples(
    sample_index: npt.NDArray[np.signedinteger],
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
) -> None:
    """Fills row j with where token `j × seq_length` lies: which entry of `document_index`, and how far into that document."""
    rows = len(sample_index)
    before, done = 0, 0
    for start in range(0, len(document_index), CHUNK):
        ends = np.cumsum(lengths[document_index[start : start + CHUNK]], dtype=np.int64)
        ends += before
        stop = min(rows, -(-int(ends[-1]) // seq_length))
        positions = np.arange(done, stop, dtype=np.int64) * seq_length
        found = np.searchsorted(ends, positions, side="right")
        sample_index[done:stop, 0] = found + start
        sample_index[done:stop, 1] = positions - np.where(found > 0, ends[found - 1], before)
        before, done = int(ends[-1]), stop
    assert done == rows
    # An empty document in front belongs to the first sample, as Megatron has it.
    sample_index[0] = 0


def order_samples(epochs: Epochs, random: np.random.RandomState) -> npt.NDArray[np.integer]:
    """Samples in the order in which they are drawn; those of a separate last epoch come last."""
    small = epochs.samples < np.iinfo(np.uint32).max - 1
    index: npt.NDArray[np.integer] = np.arange(epochs.samples, dtype=np.uint32 if small else np.int64)
    random.shuffle(index[: epochs.samples_before_final])
    if epochs.final_is_separate:
        random.shuffle(index[epochs.samples_before_final :])
    return index
