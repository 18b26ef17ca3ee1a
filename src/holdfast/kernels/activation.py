"""GELU and SwiGLU with their gradients; the gradient's column sums, which are the bias gradient, come out of the same pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.column_sums import TILE_COLUMNS, TILE_ROWS, WARPS, sum_partial, tiles
from holdfast.kernels.grid import flat_rows, power_of_two, raise_to


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """(GELU, its derivative). The tanh form is x · sigmoid(2u) with u = √(2/π) (x + 0.044715 x³)."""
    if TANH:
        square = x * x
        s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        value = x * s
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * square)
    else:
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * s
        slope = s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope


@triton.jit
def _gelu_forward(x, out, amax, count, NOTES: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value, _ = _gelu(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), TANH)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if NOTES:
        raise_to(amax, tl.max(tl.abs(value), 0))


@triton.jit
def _gelu_backward(
    dout, x, dx, sums, amax, rows, columns,
    NOTES: tl.constexpr, TANH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    total = tl.zeros((R, C), tl.float32)
    largest = tl.zeros((R, C), tl.float32)
    for start in range(tl.program_id(1) * R, rows, tl.num_programs(1) * R):
        row = start + tl.arange(0, R)[:, None]
        at = row.to(tl.int64) * columns + column
        inside = (row < rows) & (column < columns)
        _, slope = _gelu(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), TANH)
        d = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        total += d
        if NOTES:
            largest = tl.maximum(largest, tl.abs(d))
    if NOTES:
        raise_to(amax, tl.max(largest))
    column = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(sums + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _swiglu_forward(x, out, amax, columns, NOTES: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * 2 * columns + column
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)
    if NOTES:
        raise_to(amax, tl.max(tl.abs(value), 0))


@triton.jit
def _swiglu_backward(dout, x, dx, amax, columns, NOTES: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * 2 * columns + column
    d = tl.load(dout + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate, dup = d * up * s * (1.0 + gate * (1.0 - s)), d * gate * s
    tl.store(dx + at, dgate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + at + columns, dup.to(dx.dtype.element_ty), mask=inside)
    if NOTES:
        raise_to(amax, tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), 0))


BLOCK = 4096


def gelu_forward(x: Tensor, tanh: bool, amax: Tensor | None = None) -> Tensor:
    """GELU; `amax` is raised to its largest absolute value."""
    out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), BLOCK),)
    _gelu_forward[grid](x, out, amax, x.numel(), amax is not None, tanh, BLOCK, num_warps=8)
    return out


def gelu_backward(dout: Tensor, x: Tensor, tanh: bool, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of GELU's input, and its column sums; `amax` is raised to its largest absolute value."""
    dout, flat = flat_rows(dout), flat_rows(x)
    dx, (rows, columns) = torch.empty_like(flat), flat.shape
    grid, sums = tiles(rows, columns, x.device)
    _gelu_backward[grid](
        dout, flat, dx, sums, amax, rows, columns, amax is not None, tanh, TILE_ROWS, TILE_COLUMNS, num_warps=WARPS
    )
    return dx.view_as(x), sum_partial(sums)


def swiglu_forward(x: Tensor, amax: Tensor | None = None) -> Tensor:
    """silu(gate) · up of x = (gate | up); `amax` as above."""
    x = flat_rows(x)
    rows, columns = x.shape[0], x.shape[1] // 2
    out, block = torch.empty(rows, columns, dtype=x.dtype, device=x.device), min(2048, power_of_two(columns))
    _swiglu_forward[(rows, triton.cdiv(columns, block))](x, out, amax, columns, amax is not None, block, num_warps=4)
    return out


def swiglu_backward(dout: Tensor, x: Tensor, amax: Tensor | None = None) -> Tensor:
    """The gradient of x = (gate | up); `amax` as above."""
    dout, x = flat_rows(dout), flat_rows(x)
    (rows, columns), dx = dout.shape, torch.empty_like(x)
    block = min(2048, power_of_two(columns))
    grid = (rows, triton.cdiv(columns, block))
    _swiglu_backward[grid](dout, x, dx, amax, columns, amax is not None, block, num_warps=4)
    return dx
