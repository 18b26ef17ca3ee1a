"""Around the attention product: rotary positions on a fused q/k/v buffer, and its gradient put together from dq, dk and dv.

The buffer's columns are ordered (groups, query heads of a group + key + value, head width), as `linear_qkv` writes them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.column_sums import sum_partial
from holdfast.kernels.fp8 import LARGEST, Quantized, Site, empty_pair, store_narrow
from holdfast.kernels.grid import column_programs, raise_to

TILE_ROWS = 64


@triton.jit
def _rotate(
    qkv, cosine, sine, rows, tokens, batch_stride, columns, QUERIES: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr
):
    """The queries and the key of one group: (low, high) halves turn by the token's angles. The value, its last slot, stays."""
    row = (tl.program_id(0) * R + tl.arange(0, R)[:, None]).to(tl.int64)
    half, inside = tl.arange(0, HALF)[None, :], row < rows
    angle = (row // tokens) * batch_stride + (row % tokens) * 2 * HALF + half
    c = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32)
    first = qkv + row * columns + tl.program_id(1) * (QUERIES + 2) * 2 * HALF + half
    for slot in range(QUERIES + 1):
        at = first + slot * 2 * HALF
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (low * c - high * s).to(qkv.dtype.element_ty), mask=inside)
        tl.store(at + HALF, (high * c + low * s).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _gather_qkv(
    dq, dk, dv, dqkv, transposed, factor, sums, amax, cosine, sine, batch_stride, rows, tokens, columns,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    QUERIES: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, NOTES: tl.constexpr,
    LARGEST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    # 64 bits: the offset of a head in a gradient of long sequences
    group, slot = (column // (QUERIES + 2)).to(tl.int64), column % (QUERIES + 2)
    half = tl.arange(0, HALF)[None, :]
    low_sum = tl.zeros((R, HALF), tl.float32)
    high_sum = tl.zeros((R, HALF), tl.float32)
    largest = tl.zeros((R, HALF), tl.float32)
    for start in range(tl.program_id(1) * R, rows, tl.num_programs(1) * R):
        row = start + tl.arange(0, R)[:, None]
        inside = row < rows
        batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
        if slot < QUERIES:
            source = dq + batch * qb + (group * QUERIES + slot) * qh + token * qt + half
        elif slot == QUERIES:
            source = dk + batch * kb + group * kh + token * kt + half
        else:
            source = dv + batch * vb + group * vh + token * vt + half
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        if ROTARY:
            if slot <= QUERIES:
                angle = batch * batch_stride + token * 2 * HALF + half
                c = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
                s = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32)
                turned = low * c + high * s
                high = high * c - low * s
                low = turned
        if LARGEST > 0:
            by, first = tl.load(factor), column * 2 * HALF
            left, right = low.to(dq.dtype.element_ty), high.to(dq.dtype.element_ty)
            store_narrow(left, dqkv, transposed, start, first, rows, columns, columns, by, LARGEST, R, HALF)
            store_narrow(right, dqkv, transposed, start, first + HALF, rows, columns, columns, by, LARGEST, R, HALF)
        else:
            at = dqkv + row.to(tl.int64) * columns + column * 2 * HALF + half
            tl.store(at, low.to(dqkv.dtype.element_ty), mask=inside)
            tl.store(at + HALF, high.to(dqkv.dtype.element_ty), mask=inside)
        low_sum += low
        high_sum += high
        if NOTES:
            largest = tl.maximum(largest, tl.maximum(tl.abs(low), tl.abs(high)))
    if NOTES:
        raise_to(amax, tl.max(largest))
    at = sums + tl.program_id(1) * columns + column * 2 * HALF + tl.arange(0, HALF)
    tl.store(at, tl.sum(low_sum, 0))
    tl.store(at + HALF, tl.sum(high_sum, 0))


def rotate_(qkv_BTC: Tensor, queries: int, head: int, rotary: tuple[Tensor, Tensor]) -> None:
    """Applies rotary positions to the queries and keys of the buffer. `rotary`: cosines and sines, (B or 1, 1, T, D)."""
    batch, tokens, columns = qkv_BTC.shape
    cosine, sine = (part.contiguous() for part in rotary)
    stride = cosine.stride(0) if cosine.shape[0] > 1 else 0
    grid = (triton.cdiv(batch * tokens, TILE_ROWS), columns // head // (queries + 2))
    _rotate[grid](
        qkv_BTC, cosine, sine, batch * tokens, tokens, stride, columns, queries, head // 2, TILE_ROWS, num_warps=4
    )


def gather_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, rotary: tuple[Tensor, Tensor] | None, amax: Tensor | None = None,
    buffer: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The buffer's gradient (B·T, columns) from those of (B, heads, T, D), and its column sums; `amax` as elsewhere. They may be
    parts of `buffer` already: each of its elements is read and written by one program."""
    dqkv = torch.empty(_gathered(dq, dk), dtype=dq.dtype, device=dq.device) if buffer is None else buffer.flatten(0, 1)
    return dqkv, _gather(dq, dk, dv, rotary, dqkv, None, None, amax, 0.0)


def gather_gradients_fp8(
    dq: Tensor, dk: Tensor, dv: Tensor, rotary: tuple[Tensor, Tensor] | None, site: Site
) -> tuple[Quantized, Tensor]:
    """The same, written in fp8 with a delayed scale."""
    values, transposed = empty_pair(*_gathered(dq, dk), site.kind, dq.device)
    sums = _gather(dq, dk, dv, rotary, values, transposed, site.factor, site.amax, LARGEST[site.kind])
    return Quantized(values, transposed, site.scale), sums


def _gathered(dq: Tensor, dk: Tensor) -> tuple[int, int]:
    batch, heads, tokens, head = dq.shape
    return batch * tokens, (heads + 2 * dk.shape[1]) * head


def _gather(
    dq: Tensor, dk: Tensor, dv: Tensor, rotary: tuple[Tensor, Tensor] | None,
    out: Tensor, transposed: Tensor | None, factor: Tensor | None, amax: Tensor | None, largest: float,
) -> Tensor:  # fmt: skip
    _, heads, tokens, head = dq.shape
    groups, (rows, columns) = dk.shape[1], out.shape
    queries = heads // groups
    cosine, sine = (None, None) if rotary is None else (part.contiguous() for part in rotary)
    stride = cosine.stride(0) if cosine is not None and cosine.shape[0] > 1 else 0
    parts = [part if part.stride(3) == 1 else part.contiguous() for part in (dq, dk, dv)]
    blocks = groups * (queries + 2)
    programs = column_programs(triton.cdiv(rows, TILE_ROWS), blocks, 16, dq.device)
    sums = torch.empty(programs, columns, dtype=torch.float32, device=dq.device)
    strides = [step for part in parts for step in part.stride()[:3]]
    _gather_qkv[(blocks, programs)](
        *parts, out, transposed, factor, sums, amax, cosine, sine, stride, rows, tokens, columns, *strides,
        queries, head // 2, rotary is not None, amax is not None, largest, TILE_ROWS, num_warps=4,
    )  # fmt: skip
    return sum_partial(sums)
