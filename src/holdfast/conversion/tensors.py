"""Tensors in files: cut, joined, reordered and transposed as pieces, and read only when they are written out.

The invariant: a tensor never holds its elements. It is a set of pieces, each a strided view of the bits in a mapped file with
its place in the whole, so every operation here is exact and cheap, and memory does not grow with the model. Inside,
everything is a matrix: a vector of n elements is [n, 1], a scalar [1, 1].
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.system.errors import HoldfastError

Bits = NDArray[Any]

# safetensors' names of element types → width in bytes. bf16 and fp8 have no numpy type; their bits travel as unsigned integers.
WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of the types that weights have."""
BLOCK_BYTES = 8 << 20
TRANSPOSE_COLUMNS = 256
MAX_COMPARISONS = 1_000_000


def bits_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"<u{WIDTHS[dtype]}")


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """A part of a matrix: where its upper left corner is, and its bits."""

    row: int
    column: int
    bits: Bits


def _row(piece: MatrixPiece) -> int:
    return piece.row


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    stored: str
    """Element type in the source files."""
    pieces: tuple[MatrixPiece, ...]
    dtype: str
    """Element type as it will be written."""

    @property
    def matrix(self) -> tuple[int, int]:
        rows = self.shape[0] if self.shape else 1
        return rows, self.shape[1] if len(self.shape) == 2 else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]

    def rows(self, start: int, stop: int, step: int = 1) -> "Tensor":
        """Rows start, start + step, ... below stop."""
        count = len(range(start, stop, step))
        pieces = []
        for piece in self._between(start, stop):
            height = piece.bits.shape[0]
            if piece.row >= stop or piece.row + height <= start:
                continue
            first = max(0, -((start - piece.row) // step)) if piece.row > start else 0
            index = start + first * step - piece.row
            part = piece.bits[index : max(index, min(height, stop - piece.row)) : step]
            if part.size:
                pieces.append(MatrixPiece(first, piece.column, part))
        return replace(self, shape=(count, *self.shape[1:]), pieces=tuple(pieces))

    def _between(self, start: int, stop: int) -> tuple[MatrixPiece, ...]:
        """The pieces that may hold some of these rows. A tensor of many heads has thousands, and is cut as often."""
        if not self._in_bands:
            return self.pieces
        last = bisect_left(self.pieces, stop, key=_row)
        first = bisect_right(self.pieces, start, key=_row)
        return self.pieces[bisect_left(self.pieces, self.pieces[first - 1].row, key=_row) if first else 0 : last]

    @cached_property
    def _in_bands(self) -> bool:
        """Whether pieces are in the order of their rows, those that start together end together, and none reaches further."""
        heights = [(piece.row, piece.row + piece.bits.shape[0]) for piece in self.pieces]
        return all(a == b or a[1] <= b[0] for a, b in pairwise(heights))

    def columns(self, start: int, stop: int) -> "Tensor":
        return self.transposed().rows(start, stop).transposed()

    def transposed(self) -> "Tensor":
        if len(self.shape) != 2:
            raise HoldfastError(f"a tensor of shape {list(self.shape)} where a matrix is expected")
        pieces = tuple(MatrixPiece(piece.column, piece.row, piece.bits.T) for piece in self.pieces)
        return replace(self, shape=self.shape[::-1], pieces=pieces)

    def reordered(self, split: tuple[int, int, int], order: tuple[int, int, int]) -> "Tensor":
        """Rows seen as an array of shape `split` in front, its axes brought into `order`, and flattened again."""
        assert math.prod(split) == self.shape[0]
        if order == (0, 1, 2):
            return self
        strides = (split[1] * split[2], split[2], 1)
        outer, middle, inner = order
        parts = []
        for i in range(split[outer]):
            for j in range(split[middle]):
                start = i * strides[outer] + j * strides[middle]
                length = (split[inner] - 1) * strides[inner] + 1
                parts.append(self.rows(start, start + length, strides[inner]))
        return vstack(parts)

    def is_tiled(self) -> bool:
        """Whether the pieces cover the matrix exactly once. False, too, for a forged source that takes too long to check."""
        rows, columns = self.matrix
        boxes = sorted((p.row, p.column, p.row + p.bits.shape[0], p.column + p.bits.shape[1]) for p in self.pieces)
        if sum((bottom - top) * (right - left) for top, left, bottom, right in boxes) != rows * columns:
            return False
        comparisons = 0
        for index, (_, left, bottom, right) in enumerate(boxes):
            if bottom > rows or right > columns:
                return False
            for at in range(index + 1, bisect_left(boxes, (bottom,), index + 1)):
                comparisons += 1
                if (left < boxes[at][3] and boxes[at][1] < right) or comparisons > MAX_COMPARISONS:
                    return False
        return True

    def cast(self, dtype: str) -> "Tensor":
        return replace(self, dtype=dtype)

    def read(self, start: int, stop: int, scratch: NDArray[np.uint8] | None = None) -> Bits:
        """Bits of rows start..stop, in the type they are written in; a view of the file where that is possible."""
        width = self.matrix[1]
        for piece in self.pieces:
            below = piece.row + piece.bits.shape[0]
            if piece.row <= start and stop <= below and piece.bits.shape[1] == width and self.stored == self.dtype:
                part = piece.bits[start - piece.row : stop - piece.row]
                if part.flags.c_contiguous:
                    return part
        size = (stop - start) * width * WIDTHS[self.stored]
        if scratch is None or len(scratch) < size:
            scratch = np.empty(size, np.uint8)
        out = scratch[:size].view(bits_type(self.stored)).reshape(stop - start, width)
        for piece in self.pieces:
            first, last = max(start, piece.row), min(stop, piece.row + piece.bits.shape[0])
            if first < last:
                target = out[first - start : last - start, piece.column : piece.column + piece.bits.shape[1]]
                _copy(target, piece.bits[first - piece.row : last - piece.row])
        return convert_bits(out, self.stored, self.dtype)

    def blocks(self, scratch: NDArray[np.uint8] | None = None) -> Iterator[Bits]:
        """The whole tensor, a few megabytes of rows at a time; in `scratch`, if given, which the next block overwrites."""
        rows, columns = self.matrix
        at_once = max(1, BLOCK_BYTES // max(1, columns * WIDTHS[self.stored]))
        for start in range(0, rows, at_once):
            yield self.read(start, min(rows, start + at_once), scratch)

    def floats(self) -> NDArray[np.float64]:
        """All values, in double precision; for models that fit."""
        whole = self.read(0, self.matrix[0])
        return convert_bits(whole, self.dtype, "F64").view(np.float64).reshape(self.shape)


def tensor_of(bits: Bits, dtype: str) -> Tensor:
    """A tensor over the bits of a mapped file or of an array."""
    if bits.ndim > 2:
        raise HoldfastError(f"a tensor of shape {list(bits.shape)} where a vector or a matrix is expected")
    flat = bits.reshape(1, 1) if bits.ndim == 0 else bits.reshape(-1, 1) if bits.ndim == 1 else bits
    return Tensor(tuple(bits.shape), dtype, (MatrixPiece(0, 0, flat),), dtype)


def vstack(parts: Sequence[Tensor]) -> Tensor:
    """Parts below each other."""
    if len(parts) == 1:
        return parts[0]
    row, pieces = 0, []
    for part in parts:
        if part.stored != parts[0].stored or part.shape[1:] != parts[0].shape[1:]:
            raise HoldfastError(
                f"parts of one tensor do not fit together: {parts[0].stored} {list(parts[0].shape)} and "
                f"{part.stored} {list(part.shape)}"
            )
        pieces += [MatrixPiece(piece.row + row, piece.column, piece.bits) for piece in part.pieces]
        row += part.shape[0]
    return replace(parts[0], shape=(row, *parts[0].shape[1:]), pieces=_merged(pieces))


def _merged(pieces: list[MatrixPiece]) -> tuple[MatrixPiece, ...]:
    """Neighbours that are neighbours in the file too become one: reordering there and back gives the original pieces."""
    merged: list[MatrixPiece] = []
    ends: list[int] = []  # address just below each merged piece
    for piece in pieces:
        bits = piece.bits
        address, step = bits.__array_interface__["data"][0], bits.strides[0]
        if merged and ends[-1] == address:
            last = merged[-1]
            height = last.bits.shape[0]
            same = last.bits.shape[1] == bits.shape[1] and last.bits.strides == bits.strides
            if same and last.row + height == piece.row and last.column == piece.column:
                shape = (height + bits.shape[0], bits.shape[1])
                joined = np.lib.stride_tricks.as_strided(last.bits, shape, bits.strides, writeable=False)
                merged[-1] = MatrixPiece(last.row, last.column, joined)
                ends[-1] = address + bits.shape[0] * step
                continue
        merged.append(piece)
        ends.append(address + bits.shape[0] * step)
    return tuple(merged)


def repeated(row: Tensor, times: int) -> Tensor:
    """One row repeated."""
    pieces = tuple(replace(p, bits=np.broadcast_to(p.bits, (times, p.bits.shape[1]))) for p in row.pieces)
    return replace(row, shape=(times, *row.shape[1:]), pieces=pieces)


def hstack(parts: Sequence[Tensor]) -> Tensor:
    """Parts next to each other."""
    return parts[0] if len(parts) == 1 else vstack([part.transposed() for part in parts]).transposed()


def equal(left: Tensor, right: Tensor) -> bool:
    """Bit for bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return all(np.array_equal(a, b) for a, b in zip(left.blocks(), right.blocks(), strict=True))


def convert_bits(bits: Bits, source: str, target: str) -> Bits:
    """Bits of one float type as bits of another, rounded to nearest even."""
    if source == target:
        return bits
    if source == "BF16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    elif source in ("F64", "F32", "F16"):
        values = np.ascontiguousarray(bits).view(f"<f{WIDTHS[source]}")
    else:
        raise HoldfastError(f"cannot write {source} elements as {target}")
    if target == "BF16":
        return _bfloat16_bits(values.astype(np.float32))
    if target not in ("F64", "F32", "F16"):
        raise HoldfastError(f"cannot write {source} elements as {target}")
    with np.errstate(over="ignore"):  # a value beyond fp16 becomes infinite, as everywhere
        return values.astype(f"<f{WIDTHS[target]}").view(bits_type(target))


def _bfloat16_bits(values: NDArray[np.float32]) -> Bits:
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def _copy(target: Bits, source: Bits) -> None:
    """Plain numpy copies a transposed matrix at a third of the speed: it walks one side with a stride of a whole row."""
    columns = source.shape[1]
    if columns > 1 and source.shape[0] > 1 and source.strides[0] < source.strides[1]:
        for column in range(0, columns, TRANSPOSE_COLUMNS):
            target[:, column : column + TRANSPOSE_COLUMNS] = source[:, column : column + TRANSPOSE_COLUMNS]
    else:
        target[...] = source
