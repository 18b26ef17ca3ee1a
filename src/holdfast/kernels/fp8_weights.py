"""fp8 copies of many matrices by two launches: their largest absolute values, then all matrices, as they are and transposed.

The kernels find the matrices through a table of addresses, as AdamW's does.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.fp8 import LARGEST, TILE, Quantized, empty_pair, narrowed
from holdfast.kernels.grid import raise_to

TYPES = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv,
}  # fmt: skip


@triton.jit
def _place(table, tiles, TILE: tl.constexpr):
    """This program's row of the table, and the first row and column of its tile."""
    at = tiles + 3 * tl.program_id(0)
    return tl.load(at), tl.load(at + 1) * TILE, tl.load(at + 2) * TILE


@triton.jit
def _tile(entry, word, TYPE: tl.constexpr, first, second, stride, TILE: tl.constexpr):
    """Addresses of a tile of the matrix that `word` of the table row points to. The hints let 16 bytes be moved at a time."""
    at = (first + tl.arange(0, TILE)[:, None]) * stride + second + tl.arange(0, TILE)[None, :]
    pointers = tl.load(entry + word).to(tl.pointer_type(TYPE)) + at
    return tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, TILE))


@triton.jit
def _largest_of_each(table, tiles, amax, WIDE: tl.constexpr, TILE: tl.constexpr):
    matrix, row0, column0 = _place(table, tiles, TILE)
    entry = table + matrix * 5
    tile = tl.load(_tile(entry, 0, WIDE, row0, column0, tl.load(entry + 4), TILE))
    raise_to(amax + matrix, tl.max(tl.abs(tile.to(tl.float32))))


@triton.jit
def _quantize_each(
    table, tiles, amax, scales, WIDE: tl.constexpr, NARROW: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    matrix, row0, column0 = _place(table, tiles, TILE)
    entry = table + matrix * 5
    rows, columns = tl.load(entry + 3), tl.load(entry + 4)
    tile = tl.load(_tile(entry, 0, WIDE, row0, column0, columns, TILE))
    largest = tl.maximum(tl.load(amax + matrix), 1e-12)
    factor = LARGEST / largest
    tl.store(_tile(entry, 1, NARROW, row0, column0, columns, TILE), narrowed(tile, factor, LARGEST).to(NARROW))
    turned = narrowed(tl.trans(tile), factor, LARGEST)
    tl.store(_tile(entry, 2, NARROW, column0, row0, rows, TILE), turned.to(NARROW))
    if (row0 == 0) & (column0 == 0):
        tl.store(scales + matrix * 4, largest / LARGEST)


class QuantizedWeights:
    """The fp8 copies of contiguous matrices of one type that `takes` accepts; `update` follows changes of the matrices."""

    @staticmethod
    def takes(matrix: Tensor) -> bool:
        return matrix.is_contiguous() and matrix.shape[0] % TILE == 0 and matrix.shape[1] % TILE == 0

    def __init__(self, matrices: Sequence[Tensor], kind: torch.dtype) -> None:
        device = matrices[0].device
        self.addresses = [matrix.data_ptr() for matrix in matrices]
        self._kind, self._wide = kind, matrices[0].dtype
        pairs = [empty_pair(matrix.shape[0], matrix.shape[1], kind, device) for matrix in matrices]
        self._amax = torch.zeros(len(matrices), device=device)
        scales = torch.zeros(
            len(matrices), 4, device=device
        )  # 16 bytes each, to which products ask scales to be aligned
        self._scales = scales
        self.copies = [Quantized(*pair, scales[index, 0]) for index, pair in enumerate(pairs)]
        table = [
            (address, pair[0].data_ptr(), pair[1].data_ptr(), *pair[0].shape)
            for address, pair in zip(self.addresses, pairs, strict=True)
        ]
        tiles = [
            (index, row, column)
            for index, matrix in enumerate(matrices)
            for row in range(matrix.shape[0] // TILE)
            for column in range(matrix.shape[1] // TILE)
        ]
        self._table, self._tiles = torch.tensor(table).to(device), torch.tensor(tiles).to(device)

    def update(self) -> None:
        self._amax.zero_()
        grid, wide = (len(self._tiles),), TYPES[self._wide]
        _largest_of_each[grid](self._table, self._tiles, self._amax, wide, TILE, num_warps=4)
        _quantize_each[grid](
            self._table,
            self._tiles,
            self._amax,
            self._scales,
            wide,
            TYPES[self._kind],
            LARGEST[self._kind],
            TILE,
            num_warps=4,
        )
