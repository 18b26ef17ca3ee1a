"""fp8 operands for torch's scaled products: one scale per tensor.

A scaled product needs both operands with the summed dimension contiguous, so a matrix that takes part in a forward product and in
a gradient is written twice, once transposed. The scale comes from the tensor itself (dynamic: its largest absolute value must be
known before it is quantized), or from the largest absolute value that the same place had in recent passes (delayed: the kernel
that computes a matrix writes it in fp8 at once). Values beyond a delayed scale's range saturate.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.grid import processors, raise_to

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TILE, BLOCK = 64, 8192


class Quantized(NamedTuple):
    values: Tensor
    transposed: Tensor | None
    """None where the backward pass writes it."""
    scale: Tensor
    """What one unit of `values` stands for, fp32."""


class Site(NamedTuple):
    """The scale of one matrix of a pass, as addresses on the device."""

    kind: torch.dtype
    scale: Tensor
    """Of this pass, if delayed; aligned to 16 bytes, as products ask for."""
    factor: Tensor
    """1 / scale."""
    amax: Tensor
    """Raised to the largest absolute value that the matrix has in this pass."""
    delayed: bool


@triton.jit
def narrowed(tile, factor, LARGEST: tl.constexpr):
    """Scaled and cut to the range of the narrow type; what is not a number stays so."""
    return tl.clamp(tile.to(tl.float32) * factor, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_narrow(
    tile, values, transposed, row0, column0, rows, columns, stride, factor,
    LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Writes a tile of a (rows, columns) matrix in fp8, into rows of `stride` values and transposed.

    It is transposed as 16-bit values, which takes fewer moves."""
    narrow = values.dtype.element_ty
    row, column = row0 + tl.arange(0, R)[:, None], column0 + tl.arange(0, C)[None, :]
    scaled = narrowed(tile, factor, LARGEST)
    inside = (row < rows) & (column < columns)
    tl.store(values + row.to(tl.int64) * stride + column, scaled.to(narrow), mask=inside)
    turned = narrowed(tl.trans(tile), factor, LARGEST)
    row, column = row0 + tl.arange(0, R)[None, :], column0 + tl.arange(0, C)[:, None]
    inside = (row < rows) & (column < columns)
    tl.store(transposed + column.to(tl.int64) * rows + row, turned.to(narrow), mask=inside)


@triton.jit
def _largest(x, amax, count, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.abs(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)))
    raise_to(amax, tl.max(found, 0))


@triton.jit
def _quantize(
    x, amax, factor, values, transposed, scale, rows, columns,
    DELAYED: tl.constexpr, LARGEST: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row0, column0 = tl.program_id(1) * R, tl.program_id(0) * C
    row, column = row0 + tl.arange(0, R)[:, None], column0 + tl.arange(0, C)[None, :]
    inside = (row < rows) & (column < columns)
    tile = tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    if DELAYED:
        by = tl.load(factor)
        raise_to(amax, tl.max(tl.abs(tile.to(tl.float32))))
    else:
        largest = tl.maximum(tl.load(amax), 1e-12)
        by = LARGEST / largest
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, largest / LARGEST)
    store_narrow(tile, values, transposed, row0, column0, rows, columns, columns, by, LARGEST, R, C)


def largest_of(x: Tensor, amax: Tensor | None = None) -> Tensor:
    """The largest absolute value, fp32; `amax` is raised to it where it is given."""
    amax = torch.zeros((), dtype=torch.float32, device=x.device) if amax is None else amax
    programs = min(triton.cdiv(x.numel(), BLOCK), processors(x.device) * 8)
    _largest[(programs,)](x, amax, x.numel(), BLOCK, num_warps=8)
    return amax


def empty_pair(rows: int, columns: int, kind: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for a matrix in fp8 and for its transpose."""
    return (
        torch.empty(rows, columns, dtype=kind, device=device),
        torch.empty(columns, rows, dtype=kind, device=device),
    )


def quantize(x: Tensor, kind: torch.dtype, amax: Tensor | None = None) -> Quantized:
    """A contiguous matrix in fp8, as it is and transposed, scaled by its largest absolute value `amax`."""
    amax = largest_of(x) if amax is None else amax
    return _launch(x, kind, amax, amax, torch.empty((), dtype=torch.float32, device=x.device), False)


def quantize_at(x: Tensor, site: Site, noted: bool) -> Quantized:
    """The same with the scale of a site; `noted`: whether the site already knows the matrix's largest absolute value."""
    if not site.delayed:
        return quantize(x, site.kind, site.amax if noted else largest_of(x, site.amax))
    return _launch(x, site.kind, site.amax, site.factor, site.scale, True)


def _launch(x: Tensor, kind: torch.dtype, amax: Tensor, factor: Tensor, scale: Tensor, delayed: bool) -> Quantized:
    rows, columns = x.shape
    values, transposed = empty_pair(rows, columns, kind, x.device)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
    _quantize[grid](
        x, amax, factor, values, transposed, scale, rows, columns, delayed, LARGEST[kind], TILE, TILE, num_warps=4
    )
    return Quantized(values, transposed, scale)
