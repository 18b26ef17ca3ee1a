"""Reading a checkpoint without torch: verified bytes of mapped files, boxes of whole tensors by global name.

The invariant: no byte is returned before the checksum of its chunk was compared with the manifest's.
"""

import math
import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.folder import STEP_FOLDER, newest
from holdfast.checkpoint.layout import ITEM_SIZES, NUMPY_TYPES, TensorSlice
from holdfast.checkpoint.manifest import (
    CHUNK,
    FILE_NAME,
    Manifest,
    ShardFile,
    chunk_checksum,
    pieces_of,
    read_manifest,
)
from holdfast.checkpoint.plan import overlap
from holdfast.system.bounded_files import open_regular
from holdfast.system.errors import HoldfastError

Bytes = NDArray[np.uint8]


class VerifiedFile:
    """A shard, mapped at first use; `view` returns bytes of it that match their checksum."""

    types: Mapping[str, Any] = NUMPY_TYPES

    def __init__(self, folder: Path, entry: ShardFile) -> None:
        self.path, self._entry = folder / entry.name, entry
        self._verified = bytearray(len(entry.chunks))
        self._mapped: Bytes | None = None
        self._map: mmap.mmap | None = None

    def check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise HoldfastError(f"{self.path} is missing") from None
        if size != self._entry.bytes:
            raise HoldfastError(f"{self.path} is damaged: {size:,} bytes instead of {self._entry.bytes:,}")

    def view(self, begin: int, end: int) -> Bytes:
        for index in range(begin // CHUNK, -(-end // CHUNK)):
            self.verify(index)
        return self._content[begin:end]

    def verify(self, index: int) -> None:
        if not self._verified[index]:
            begin = index * CHUNK
            found = chunk_checksum(self._content[begin : begin + CHUNK].data)
            if found != self._entry.chunks[index]:
                raise HoldfastError(
                    f"{self.path} is damaged: the checksum of the 16 MiB from byte {begin:,} does not match"
                )
            self._verified[index] = 1

    def drop_pages(self) -> None:
        """Drops the pages that were read; the next access reads them from the file again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def verify_all(self) -> None:
        for index in range(len(self._verified)):
            self.verify(index)

    @property
    def _content(self) -> Bytes:
        if self._mapped is None:
            self.check_size()
            with open_regular(self.path) as file:
                # a private, writable map, because torch warns about read-only memory; it is never written
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._mapped = np.frombuffer(self._map, dtype=np.uint8)
        return self._mapped


class Content(Protocol):
    """Bytes by position, verified before they are returned: in a numpy array or, of `types` alike, a tensor on a device."""

    types: Mapping[str, Any]
    """the dtypes of such an array, by their safetensors names"""

    def view(self, begin: int, end: int) -> Any: ...


class Tensors:
    """Global tensors, assembled from the slices in several contents (files, memory slots)."""

    def __init__(self, origin: str, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        self.origin = origin
        self.tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        """name → dtype (as safetensors calls it) and global shape"""
        self._pieces: dict[str, list[tuple[TensorSlice, int, Content]]] = defaultdict(list)

    def add(self, piece: TensorSlice, start: int, content: Content) -> None:
        self._pieces[piece.name].append((piece, start, content))

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[Any]:
        """A whole tensor, or the rows [first, last) of it. bfloat16 is returned as uint16: numpy has no such type."""
        dtype, shape = self._entry(name)
        first, last = rows if rows is not None else (0, shape[0] if shape else 1)
        box = ((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])) if shape else ((), ())
        whole: NDArray[Any] = np.empty(box[1], dtype=NUMPY_TYPES[dtype])
        for slices, part in self.parts(name, *box):
            whole[slices] = part
        return whole

    def parts(
        self, name: str, offset: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], NDArray[Any]]]:
        """The parts of a box of a tensor: where in the box, and the (verified, mapped) elements."""
        self._entry(name)
        missing = math.prod(shape)
        for piece, start, content in self._pieces[name]:
            begin, extent = overlap(offset, shape, piece.offset, piece.shape)
            if not math.prod(extent):
                continue
            missing -= math.prod(extent)
            rows = (begin[0] - piece.offset[0], begin[0] - piece.offset[0] + extent[0]) if extent else (0, 1)
            row_bytes = math.prod(piece.shape[1:]) * ITEM_SIZES[piece.dtype]
            raw = content.view(start + rows[0] * row_bytes, start + rows[1] * row_bytes)
            part: NDArray[Any] = raw.view(content.types[piece.dtype]).reshape(extent[:1] + piece.shape[1:])
            inner = tuple(
                slice(b - o, b - o + e) for b, o, e in zip(begin[1:], piece.offset[1:], extent[1:], strict=True)
            )
            yield (
                tuple(slice(b - o, b - o + e) for b, o, e in zip(begin, offset, extent, strict=True)),
                part[(slice(None), *inner)] if extent else part,
            )
        if missing > 0:
            raise HoldfastError(f"{self.origin} lacks {missing:,} elements of {name}")

    def _entry(self, name: str) -> tuple[str, tuple[int, ...]]:
        try:
            return self.tensors[name]
        except KeyError:
            raise HoldfastError(f"{self.origin} has no tensor {name}") from None


class Checkpoint(Tensors):
    """A checkpoint folder, open for reading. Tensors have global names."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(str(path), manifest.tensors)
        self.path, self.manifest = path, manifest
        self._files = {entry.name: VerifiedFile(path, entry) for entry in manifest.files}
        for entry in manifest.files:
            for piece, start in pieces_of(manifest, entry):
                self.add(piece, start, self._files[entry.name])

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the mapped files; they are unmapped when the last array on them is gone."""
        self._files.clear()
        self._pieces.clear()

    def drop_pages(self) -> None:
        """Bounds the memory of a process that reads a large checkpoint from end to end."""
        for file in self._files.values():
            file.drop_pages()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world(self) -> int:
        return self.manifest.world

    @property
    def padded_rows(self) -> dict[str, int]:
        return dict(self.manifest.padded_rows)

    @property
    def shared(self) -> dict[str, Any]:
        return self.manifest.shared

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Compares every byte of this share of the files with its checksum; all files must be there and have their size."""
        for index, file in enumerate(self._files.values()):
            file.check_size()
            if index % of == share:
                file.verify_all()


def open_checkpoint(path: Path | str, *, untrusted: bool = False) -> Checkpoint:
    """Opens a checkpoint: a step folder, or the newest step of a run or checkpoints folder. `untrusted`: see `read_manifest`."""
    itself = (Path(path) / FILE_NAME).exists() or STEP_FOLDER.fullmatch(Path(path).name)
    folder = Path(path) if itself else newest(path)
    if folder is None:
        raise HoldfastError(f"there is no checkpoint in {path}")
    return Checkpoint(folder, read_manifest(folder, untrusted=untrusted))
