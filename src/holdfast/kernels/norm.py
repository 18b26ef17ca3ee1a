"""LayerNorm and RMSNorm with what surrounds them: the sum with a branch and its bias before, both gradients after.

Rows are tokens. The norm's input, its output and their gradients are in the compute type, arithmetic and weight gradients in
fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.column_sums import sum_partial
from holdfast.kernels.fp8 import LARGEST, TILE, Site, narrowed
from holdfast.kernels.grid import column_programs, flat_rows, power_of_two, raise_to, warps_of

PER_PROCESSOR = 8


@triton.jit
def _norm_forward(
    x, delta, bias, weight, shift, total, out, mean, scale, amax, narrowing, columns, eps,
    LARGEST: tl.constexpr, NOTES: tl.constexpr, ADDS: tl.constexpr, BIASED: tl.constexpr, SHIFTED: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centre = tl.sum(value, 0) / columns if CENTRED else 0.0
    value = tl.where(inside, value - centre, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)
    result = value * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        result += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    if NOTES:
        raise_to(amax, tl.max(tl.abs(result), 0))
    if LARGEST > 0:
        result = narrowed(result.to(x.dtype.element_ty), tl.load(narrowing), LARGEST)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    if CENTRED:
        tl.store(mean + row, centre)
    tl.store(scale + row, factor)


@triton.jit
def _norm_transposed(
    x, weight, shift, mean, scale, narrowing, out, rows, columns,
    LARGEST: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row0, column0 = tl.program_id(1) * TILE, tl.program_id(0) * TILE
    row, column = row0 + tl.arange(0, TILE)[:, None], column0 + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value -= tl.load(mean + row, mask=row < rows, other=0.0)
    value *= tl.load(scale + row, mask=row < rows, other=0.0)
    value *= tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    if SHIFTED:
        value += tl.load(shift + column, mask=column < columns, other=0.0).to(tl.float32)
    turned = narrowed(tl.trans(value.to(x.dtype.element_ty)), tl.load(narrowing), LARGEST)
    row, column = row0 + tl.arange(0, TILE)[None, :], column0 + tl.arange(0, TILE)[:, None]
    at = out + column.to(tl.int64) * rows + row
    tl.store(at, turned.to(out.dtype.element_ty), mask=(row < rows) & (column < columns))


@triton.jit
def _norm_backward(
    dout, dtotal, x, weight, mean, scale, dx, sums, rows, columns,
    ADDS: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dshift = tl.zeros((ROWS, BLOCK), tl.float32)
    dsum = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        at = row.to(tl.int64) * columns + column
        dy = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(scale + row, mask=row < rows, other=0.0)
        if CENTRED:
            normed -= tl.load(mean + row, mask=row < rows, other=0.0)
        normed = tl.where(inside, normed * factor, 0.0)
        scaled = dy * w
        d = scaled - normed * (tl.sum(scaled * normed, 1) / columns)[:, None]
        if CENTRED:
            d -= (tl.sum(scaled, 1) / columns)[:, None]
        d *= factor
        if ADDS:
            d += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, d, 0.0)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        dweight += dy * normed
        dshift += dy
        dsum += d
    column = tl.arange(0, BLOCK)
    at = program * 3 * columns + column
    tl.store(sums + at, tl.sum(dweight, 0), mask=column < columns)
    tl.store(sums + at + columns, tl.sum(dshift, 0), mask=column < columns)
    tl.store(sums + at + 2 * columns, tl.sum(dsum, 0), mask=column < columns)


def norm_forward(
    x: Tensor, weight: Tensor, shift: Tensor | None, eps: float, centred: bool, delta: Tensor | None,
    bias: Tensor | None, site: Site | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(x + delta + bias, its norm, mean and 1/deviation of each row). Without `delta` the first is `x` itself.

    `site` learns the norm's largest absolute value; if its scale is delayed, the norm is written in fp8."""
    x = flat_rows(x)
    rows, columns = x.shape
    narrow = site is not None and site.delayed
    out = torch.empty_like(x, dtype=site.kind if site is not None and narrow else x.dtype)
    total = x if delta is None else torch.empty_like(x)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(scale) if centred else None
    delta = None if delta is None else flat_rows(delta)
    block = power_of_two(columns)
    _norm_forward[(rows,)](
        x, delta, bias, weight, shift, total, out, mean, scale, site and site.amax, site and site.factor, columns, eps,
        LARGEST[out.dtype] if narrow else 0.0, site is not None, delta is not None, bias is not None, shift is not None, centred,
        block, num_warps=warps_of(block),
    )  # fmt: skip
    return total, out, mean, scale


def norm_transposed(
    total: Tensor, weight: Tensor, shift: Tensor | None, mean: Tensor | None, scale: Tensor, site: Site
) -> Tensor:
    """The norm in fp8, transposed, from what the forward pass kept: reading the sum again is less than keeping this."""
    rows, columns = flat_rows(total).shape
    out = torch.empty(columns, rows, dtype=site.kind, device=total.device)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
    _norm_transposed[grid](
        flat_rows(total), weight, shift, mean, scale, site.factor, out, rows, columns,
        LARGEST[site.kind], shift is not None, mean is not None, TILE, num_warps=4,
    )  # fmt: skip
    return out


def norm_backward(
    dout: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, sums): the gradient of the norm's input, with the gradient `dtotal` of its other uses added; and [3, columns] with the
    gradients of weight and shift and the column sums of dx, which are the gradient of a bias added before the norm."""
    dout, total = flat_rows(dout), flat_rows(total)
    rows, columns = total.shape
    dx = torch.empty_like(total)
    dtotal = None if dtotal is None else flat_rows(dtotal)
    block = power_of_two(columns)
    programs = column_programs(rows, 1, PER_PROCESSOR, total.device)
    sums = torch.empty(programs, 3, columns, dtype=torch.float32, device=total.device)
    _norm_backward[(programs,)](
        dout, dtotal, total, weight, mean, scale, dx, sums, rows, columns,
        dtotal is not None, mean is not None, 1, block, num_warps=max(1, block // 1024),
    )  # fmt: skip
    return dx, sum_partial(sums)


@triton.jit
def _add_bias(x, branch, bias, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def add_bias(x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
    """x + branch + bias."""
    rows, branches = flat_rows(x), flat_rows(branch)
    out, block = torch.empty_like(rows), power_of_two(rows.shape[1])
    _add_bias[(len(rows),)](rows, branches, bias, out, rows.shape[1], block, num_warps=warps_of(block))
    return out.view_as(x)
