"""Megatron's MMIDIDX pair: PREFIX.bin holds raw tokens, PREFIX.idx holds the positions of sequences and documents.

The invariant: a reader that opens without an error never reads outside its file, whatever bytes the pair holds; the counts and
the ends are checked when it opens, every single entry by `check`. docs/formats.md gives the format byte by byte.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from holdfast.system.atomic_files import explain_os_error, fsync, rename_into_place, temporary_beside
from holdfast.system.errors import HoldfastError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
LONGEST_SEQUENCE = 2**31 - 1
# Index arrays are written in blocks of this many entries: memory stays flat however many documents there are.
BLOCK = 1 << 18

Array = npt.NDArray[Any]


def dtype_for_vocabulary(vocab_size: int) -> npt.DTypeLike:
    """Megatron's rule: two bytes per token below 65,500 tokens, four from there on."""
    return np.uint16 if vocab_size < 65500 else np.int32


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """The .bin and the .idx of a prefix (a prefix given with either ending is understood)."""
    name = str(prefix)
    if name.endswith((".bin", ".idx")):
        name = name[:-4]
    return Path(name + ".bin"), Path(name + ".idx")


class IndexedDataset(Sequence[Array]):
    """Sequences of a .bin/.idx pair, memory-mapped. Items are read-only views; it pickles as its path, for workers."""

    def __init__(self, prefix: Path | str) -> None:
        self.bin_path, self.idx_path = pair_paths(prefix)
        self.prefix = str(self.bin_path)[:-4]
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise HoldfastError(f"{path} does not exist; a dataset is a pair PREFIX.bin and PREFIX.idx")
        index = _map(self.idx_path)
        self.dtype, sequences, documents = _read_header(self.idx_path, index)
        self._lay_out(index, sequences, documents)
        data = _map(self.bin_path)
        self._check_ends(len(data))
        # A trailing fraction of a token belongs to no sequence.
        self.tokens: Array = np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize)
        self._bytes = data
        # memoryviews hand out plain ints several times faster than arrays do.
        self._length_of = memoryview(index)[HEADER.size :][: 4 * sequences].cast("i")
        self._pointer_of = memoryview(index)[HEADER.size + 4 * sequences :][: 8 * sequences].cast("q")
        self._shift = self.dtype.itemsize.bit_length() - 1

    def _lay_out(self, index: Any, sequences: int, documents: int) -> None:
        offset = HEADER.size
        plain = offset + 12 * sequences + 8 * documents
        self.multimodal = sequences > 0 and len(index) == plain + sequences
        if len(index) != plain and not self.multimodal:
            raise HoldfastError(
                f"{self.idx_path} has {len(index):,} bytes, but {sequences:,} sequences and {documents:,} document entries "
                f"take {plain:,}: the file is damaged or was cut short; write it again"
            )
        self.sequence_lengths: Array = np.frombuffer(index, "<i4", sequences, offset)
        offset += 4 * sequences
        self.sequence_pointers: Array = np.frombuffer(index, "<i8", sequences, offset)
        offset += 8 * sequences
        self.document_indices: Array = np.frombuffer(index, "<i8", documents, offset)
        offset += 8 * documents
        self.sequence_modes: Array | None = (
            np.frombuffer(index, np.int8, sequences, offset) if self.multimodal else None
        )

    def _check_ends(self, size: int) -> None:
        """The checks that cost nothing: first and last entries against the counts and the size of the .bin."""
        ends = self.document_indices
        if len(ends) == 0 or ends[0] != 0 or ends[-1] != len(self.sequence_lengths):
            raise HoldfastError(
                f"{self.idx_path}: its documents do not cover its sequences; the file is damaged, write it again"
            )
        if len(self.sequence_lengths):
            end = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
            if self.sequence_pointers[0] < 0 or end > size or end < 0:
                raise HoldfastError(
                    f"{self.bin_path} has {size:,} bytes, but {self.idx_path.name} points up to {end:,}: "
                    "one of the two is damaged or belongs to another dataset"
                )

    def check(self) -> None:
        """Looks at every entry of the index; raises HoldfastError at the first that does not hold."""
        size = self.bin_path.stat().st_size
        for start in range(0, len(self), BLOCK):
            lengths = self.sequence_lengths[start : start + BLOCK].astype(np.int64)
            pointers = self.sequence_pointers[start : start + BLOCK]
            wrong = (lengths < 0) | (pointers < 0) | (pointers % self.dtype.itemsize != 0)
            wrong |= pointers > size - lengths * self.dtype.itemsize
            if wrong.any():
                raise HoldfastError(
                    f"{self.idx_path}: sequence {start + int(np.argmax(wrong))} points outside {self.bin_path.name}"
                )
        for start in range(0, len(self.document_indices) - 1, BLOCK):
            steps = np.diff(self.document_indices[start : start + BLOCK + 1])
            if (steps < 0).any():
                raise HoldfastError(
                    f"{self.idx_path}: document {start + int(np.argmax(steps < 0))} ends before it begins; the file is damaged"
                )

    def __len__(self) -> int:
        return len(self._length_of)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        """Sequence `index` as a view, or a list of views for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        pointer, length = self._pointer_of[index], self._length_of[index]
        begin = pointer >> self._shift
        found: Array = self.tokens[begin : begin + length]
        if len(found) != length or pointer < 0 or begin << self._shift != pointer:
            raise HoldfastError(f"{self.idx_path}: sequence {index} points outside {self.bin_path.name}")
        return found

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Array:
        """Tokens `offset` to `offset + length` of sequence `index` (to its end without a length)."""
        whole = self[index]
        stop = len(whole) if length is None else offset + length
        if not 0 <= offset <= stop <= len(whole):
            raise IndexError(f"tokens {offset} to {stop} of sequence {index}, which has {len(whole)}")
        return whole[offset:stop]

    @property
    def document_count(self) -> int:
        return len(self.document_indices) - 1

    def document(self, index: int) -> list[Array]:
        """The sequences of document `index`; an empty document has none."""
        begin, end = self.document_indices[index : index + 2]
        return [self[i] for i in range(int(begin), int(end))]

    @staticmethod
    def exists(prefix: Path | str) -> bool:
        return all(path.is_file() for path in pair_paths(prefix))

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return type(self), (self.prefix,)


def _map(path: Path) -> Any:
    """The bytes of a file, mapped read-only; an empty file cannot be mapped and is an empty bytes object."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(path: Path, index: Any) -> tuple[np.dtype[Any], int, int]:
    if len(index) < HEADER.size:
        raise HoldfastError(f"{path} is not an .idx file: it has only {len(index)} bytes")
    magic, version, code, sequences, documents = HEADER.unpack_from(index)
    if magic != MAGIC:
        raise HoldfastError(f"{path} is not an .idx file: it does not begin with MMIDIDX")
    if version != VERSION:
        raise HoldfastError(f"{path} is of version {version}; Holdfast reads version {VERSION}")
    if code not in DTYPES:
        raise HoldfastError(f"{path} names the token type {code}, which does not exist; the file is damaged")
    return np.dtype(DTYPES[code]), sequences, documents


@dataclass(frozen=True)
class IndexPart:
    """What one stretch of a dataset adds to its index: sequence lengths, and the number of sequences after each document."""

    lengths: Array
    documents: Array  # cumulative and without the leading 0, counted from the part's own beginning
    modes: Array | None = None


def write_index(path: Path, dtype: npt.DTypeLike, parts: Sequence[IndexPart]) -> None:
    """Writes the .idx of the parts, one after the other; memory does not grow with them when they are mapped."""
    sequences = sum(len(part.lengths) for part in parts)
    documents = sum(len(part.documents) for part in parts)
    code = CODES[np.dtype(dtype)]
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for part in parts:
            for block in _blocks(part.lengths):
                file.write(block.astype("<i4", copy=False).tobytes())
        position = 0
        for part in parts:
            for block in _blocks(part.lengths):
                ends = np.cumsum(block, dtype="<i8") * np.dtype(dtype).itemsize + position
                file.write(np.concatenate([[position], ends[:-1]]).astype("<i8").tobytes())
                position = int(ends[-1])
        file.write(struct.pack("<q", 0))
        before = 0
        for part in parts:
            for block in _blocks(part.documents):
                file.write((block.astype("<i8") + before).tobytes())
            before += len(part.lengths)
        for part in parts:
            if part.modes is not None:
                file.write(part.modes.astype(np.int8).tobytes())


def _blocks(array: Array) -> Iterator[Array]:
    for start in range(0, len(array), BLOCK):
        yield array[start : start + BLOCK]


def publish_pairs(pairs: Sequence[tuple[Path, Path, Path | str]]) -> None:
    """Gives finished (.bin, .idx) files their final prefixes. A reader never finds a .bin with the .idx of another one.

    The .idx is what makes a dataset: all old ones go first, all new ones come last. A .bin that is not there has its final
    name already, from a call that was killed; calling again completes it.
    """
    pending = [bin_file for bin_file, _, _ in pairs if bin_file.exists()]
    for file in (*pending, *(idx_file for _, idx_file, _ in pairs)):
        fsync(file)
    finals = [pair_paths(prefix) for _, _, prefix in pairs]
    for _, final_idx in finals:
        final_idx.unlink(missing_ok=True)
    for (bin_file, _, _), (final_bin, _) in zip(pairs, finals, strict=True):
        if bin_file in pending:
            rename_into_place(bin_file, final_bin)
    for (_, idx_file, _), (_, final_idx) in zip(pairs, finals, strict=True):
        rename_into_place(idx_file, final_idx)


class IndexedDatasetBuilder:
    """Writes a pair document by document; nothing has its final name before `finalize`. For tests, tools and small data."""

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike = np.int32) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        if self.dtype not in CODES:
            raise HoldfastError(f"the format has no code for tokens of type {self.dtype}")
        bin_path, idx_path = pair_paths(prefix)
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin, self._idx = temporary_beside(bin_path), temporary_beside(idx_path)
        self._file = self._bin.open("wb")
        self._lengths: list[int] = []
        self._documents: list[int] = []

    def add_sequence(self, tokens: npt.ArrayLike) -> None:
        array = np.asarray(tokens, self.dtype)
        if len(array) > LONGEST_SEQUENCE:
            raise HoldfastError(
                f"a sequence of {len(array):,} tokens does not fit: the format holds {LONGEST_SEQUENCE:,} at most"
            )
        self._file.write(array.tobytes())
        self._lengths.append(len(array))

    def end_document(self) -> None:
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """A document's tokens, cut into sequences by `lengths` (one sequence without them)."""
        array = np.asarray(tokens, self.dtype)
        start = 0
        for length in [len(array)] if lengths is None else lengths:
            self.add_sequence(array[start : start + length])
            start += length
        self.end_document()

    def finalize(self) -> None:
        try:
            self._file.close()
            part = IndexPart(np.array(self._lengths, np.int32), np.array(self._documents, np.int64))
            write_index(self._idx, self.dtype, [part])
            publish_pairs([(self._bin, self._idx, self.prefix)])
        except OSError as error:
            raise explain_os_error(error, pair_paths(self.prefix)[0]) from error
        finally:
            self._bin.unlink(missing_ok=True)
            self._idx.unlink(missing_ok=True)
