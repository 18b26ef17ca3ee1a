"""Sums over the tokens of a matrix, which are bias gradients: of a matrix itself, and of the partial sums of other kernels.

A kernel that sums on the way writes one row of partial sums per program, and `sum_partial` adds the rows up: always in the
same order, so that results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.grid import column_programs, flat_rows

TILE_ROWS, TILE_COLUMNS, WARPS = 8, 512, 4
TOTAL_ROWS, TOTAL_COLUMNS = 64, 32


@triton.jit
def _column_sums(x, sums, rows, columns, R: tl.constexpr, C: tl.constexpr):
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    total = tl.zeros((R, C), tl.float32)
    for start in range(tl.program_id(1) * R, rows, tl.num_programs(1) * R):
        row = start + tl.arange(0, R)[:, None]
        inside = (row < rows) & (column < columns)
        total += tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)
    column = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(sums + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


def column_sums(x: Tensor) -> Tensor:
    """fp32 sums over the tokens."""
    x = flat_rows(x)
    rows, columns = x.shape
    grid, sums = tiles(rows, columns, x.device)
    _column_sums[grid](x, sums, rows, columns, TILE_ROWS, TILE_COLUMNS, num_warps=WARPS)
    return sum_partial(sums)


def tiles(rows: int, columns: int, device: torch.device) -> tuple[tuple[int, int], Tensor]:
    """The grid of a kernel that sums columns, and the room for each program's sums."""
    blocks = triton.cdiv(columns, TILE_COLUMNS)
    programs = column_programs(triton.cdiv(rows, TILE_ROWS), blocks, 8, device)
    return (blocks, programs), torch.empty(programs, columns, dtype=torch.float32, device=device)


def sum_partial(partial: Tensor) -> Tensor:
    """The sum over the first dimension of fp32 partial sums."""
    flat = partial.view(partial.shape[0], -1)
    rows, columns = flat.shape
    sums = torch.empty(1, columns, dtype=torch.float32, device=partial.device)
    grid = (triton.cdiv(columns, TOTAL_COLUMNS), 1)
    _column_sums[grid](flat, sums, rows, columns, TOTAL_ROWS, TOTAL_COLUMNS, num_warps=4)
    return sums.view(partial.shape[1:])
