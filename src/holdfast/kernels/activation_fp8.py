"""GELU and SwiGLU, and their gradients, written in fp8 at once, as they are and transposed; for sites with a delayed scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.activation import _gelu
from holdfast.kernels.column_sums import sum_partial
from holdfast.kernels.fp8 import LARGEST, Quantized, Site, empty_pair, store_narrow
from holdfast.kernels.grid import raise_to

TILE_ROWS, TILE_COLUMNS, WARPS = 64, 64, 4


@triton.jit
def _gelu_forward_fp8(
    x, factor, amax, values, transposed, rows, columns,
    TANH: tl.constexpr, LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row0, column0 = tl.program_id(1) * R, tl.program_id(0) * C
    row, column = row0 + tl.arange(0, R)[:, None], column0 + tl.arange(0, C)[None, :]
    inside = (row < rows) & (column < columns)
    tile = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    value, _ = _gelu(tile.to(tl.float32), TANH)
    raise_to(amax, tl.max(tl.abs(value)))
    narrow = value.to(x.dtype.element_ty)
    store_narrow(narrow, values, transposed, row0, column0, rows, columns, columns, tl.load(factor), LARGEST, R, C)


@triton.jit
def _gelu_backward_fp8(
    dout, x, factor, amax, values, transposed, sums, rows, columns,
    TANH: tl.constexpr, LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row0, column0 = tl.program_id(1) * R, tl.program_id(0) * C
    row, column = row0 + tl.arange(0, R)[:, None], column0 + tl.arange(0, C)[None, :]
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    _, slope = _gelu(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), TANH)
    d = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32) * slope
    raise_to(amax, tl.max(tl.abs(d)))
    narrow = d.to(x.dtype.element_ty)
    store_narrow(narrow, values, transposed, row0, column0, rows, columns, columns, tl.load(factor), LARGEST, R, C)
    column = column0 + tl.arange(0, C)
    tl.store(sums + tl.program_id(1) * columns + column, tl.sum(d, 0), mask=column < columns)


@triton.jit
def _swiglu_forward_fp8(
    x, factor, amax, values, transposed, rows, columns, LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    row0, column0 = tl.program_id(1) * R, tl.program_id(0) * C
    row, column = row0 + tl.arange(0, R)[:, None], column0 + tl.arange(0, C)[None, :]
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * 2 * columns + column
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
    raise_to(amax, tl.max(tl.abs(value)))
    narrow = value.to(x.dtype.element_ty)
    store_narrow(narrow, values, transposed, row0, column0, rows, columns, columns, tl.load(factor), LARGEST, R, C)


@triton.jit
def _swiglu_backward_fp8(
    dout, x, factor, amax, values, transposed, rows, columns, LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    row0, column0 = tl.program_id(1) * R, tl.program_id(0) * C
    row, column = row0 + tl.arange(0, R)[:, None], column0 + tl.arange(0, C)[None, :]
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * 2 * columns + column
    d = tl.load(dout + row.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate, dup = d * up * s * (1.0 + gate * (1.0 - s)), d * gate * s
    raise_to(amax, tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup))))
    by = tl.load(factor)
    store_narrow(
        dgate.to(x.dtype.element_ty), values, transposed, row0, column0, rows, columns, 2 * columns, by, LARGEST, R, C
    )
    store_narrow(
        dup.to(x.dtype.element_ty), values + columns, transposed + columns.to(tl.int64) * rows,
        row0, column0, rows, columns, 2 * columns, by, LARGEST, R, C,
    )  # fmt: skip


def gelu_forward_fp8(x: Tensor, tanh: bool, site: Site) -> Quantized:
    rows, columns = x.shape
    values, transposed = empty_pair(rows, columns, site.kind, x.device)
    _gelu_forward_fp8[_grid(rows, columns)](
        x, site.factor, site.amax, values, transposed, rows, columns,
        tanh, LARGEST[site.kind], TILE_ROWS, TILE_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return Quantized(values, transposed, site.scale)


def gelu_backward_fp8(dout: Tensor, x: Tensor, tanh: bool, site: Site) -> tuple[Quantized, Tensor]:
    """The gradient of GELU's input, and its column sums."""
    rows, columns = x.shape
    values, transposed = empty_pair(rows, columns, site.kind, x.device)
    grid = _grid(rows, columns)
    sums = torch.empty(grid[1], columns, dtype=torch.float32, device=x.device)
    _gelu_backward_fp8[grid](
        dout, x, site.factor, site.amax, values, transposed, sums, rows, columns,
        tanh, LARGEST[site.kind], TILE_ROWS, TILE_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return Quantized(values, transposed, site.scale), sum_partial(sums)


def swiglu_forward_fp8(x: Tensor, site: Site) -> Quantized:
    """silu(gate) · up of x = (gate | up)."""
    rows, columns = x.shape[0], x.shape[1] // 2
    values, transposed = empty_pair(rows, columns, site.kind, x.device)
    _swiglu_forward_fp8[_grid(rows, columns)](
        x, site.factor, site.amax, values, transposed, rows, columns,
        LARGEST[site.kind], TILE_ROWS, TILE_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return Quantized(values, transposed, site.scale)


def swiglu_backward_fp8(dout: Tensor, x: Tensor, site: Site) -> Quantized:
    rows, columns = x.shape[0], x.shape[1] // 2
    values, transposed = empty_pair(rows, 2 * columns, site.kind, x.device)
    _swiglu_backward_fp8[_grid(rows, columns)](
        dout, x, site.factor, site.amax, values, transposed, rows, columns,
        LARGEST[site.kind], TILE_ROWS, TILE_COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return Quantized(values, transposed, site.scale)


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(rows, TILE_ROWS)
