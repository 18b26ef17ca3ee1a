"""fp8 operands for torch's scaled products: one scale per tensor, from the tensor itself (nothing to carry from step to step).

A scaled product needs both operands with the summed dimension contiguous, so a matrix that takes part in a forward product and
in a gradient is written twice, once transposed. Kernels that produce
a matrix can note its largest absolute value on the way (`amax`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.grid import processors

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TILE, BLOCK = 64, 8192


class Quantized(NamedTuple):
    values: Tensor
    transposed: Tensor
    scale: Tensor
    """What one unit of `values` stands for, fp32."""


@triton.jit
def _largest(x, amax, count, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.abs(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)))
    tl.atomic_max(amax, tl.max(found, 0))


@triton.jit
def _quantize(
    x, amax, values, transposed, scale, rows, columns, LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    largest = tl.maximum(tl.load(amax), 1e-12)
    row = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    inside = (row < rows) & (column < columns)
    tile = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    narrow = values.dtype.element_ty
    factor = LARGEST / largest
    scaled = tl.clamp(tile.to(tl.float32) * factor, -LARGEST, LARGEST)
    tl.store(values + row.to(tl.int64) * columns + column, scaled.to(narrow), mask=inside)
    turned = tl.clamp(tl.trans(tile).to(tl.float32) * factor, -LARGEST, LARGEST)  # turned as 16-bit values: fewer moves
    row, column = tl.program_id(1) * R + tl.arange(0, R)[None, :], tl.program_id(0) * C + tl.arange(0, C)[:, None]
    inside = (row < rows) & (column < columns)
    tl.store(transposed + column.to(tl.int64) * rows + row, turned.to(narrow), mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, largest / LARGEST)


def largest_of(x: Tensor) -> Tensor:
    """The largest absolute value, fp32."""
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    programs = min(triton.cdiv(x.numel(), BLOCK), processors(x.device) * 8)
    _largest[(programs,)](x, amax, x.numel(), BLOCK, num_warps=8)
    return amax


def quantize(x: Tensor, kind: torch.dtype, amax: Tensor | None = None) -> Quantized:
    """A contiguous matrix in fp8, as it is and transposed."""
    rows, columns = x.shape
    amax = largest_of(x) if amax is None else amax
    values = torch.empty(rows, columns, dtype=kind, device=x.device)
    transposed = torch.empty(columns, rows, dtype=kind, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
    _quantize[grid](x, amax, values, transposed, scale, rows, columns, LARGEST[kind], TILE, TILE, num_warps=4)
    return Quantized(values, transposed, scale)
