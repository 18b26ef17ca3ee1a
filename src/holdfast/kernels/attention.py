"""Around the attention product: rotary positions on a fused q/k/v buffer, and its gradient put together from dq, dk and dv.

The buffer's columns are ordered (groups, query heads of a group + key + value, head width), as `linear_qkv` writes them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.grid import column_programs

TILE_ROWS = 64


@triton.jit
def _rotate(qkv, cosine, sine, tokens, batch_stride, columns, SLOTS: tl.constexpr, HALF: tl.constexpr):
    """One head of one token: (low, high) halves turn by the token's angles. Values (the last slot of a group) stay."""
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = slot // (SLOTS - 1) * SLOTS + slot % (SLOTS - 1)
    half = tl.arange(0, HALF)
    at = qkv + row * columns + slot * 2 * HALF + half
    angle = (row // tokens) * batch_stride + (row % tokens) * 2 * HALF + half
    c, s = tl.load(cosine + angle).to(tl.float32), tl.load(sine + angle).to(tl.float32)
    low, high = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    tl.store(at, (low * c - high * s).to(qkv.dtype.element_ty))
    tl.store(at + HALF, (high * c + low * s).to(qkv.dtype.element_ty))


@triton.jit
def _gather_qkv(
    dq, dk, dv, dqkv, sums, amax, cosine, sine, batch_stride, rows, tokens, columns,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    QUERIES: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, NOTES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    group, slot = column // (QUERIES + 2), column % (QUERIES + 2)
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
        at = dqkv + row.to(tl.int64) * columns + column * 2 * HALF + half
        tl.store(at, low.to(dqkv.dtype.element_ty), mask=inside)
        tl.store(at + HALF, high.to(dqkv.dtype.element_ty), mask=inside)
        low_sum += low
        high_sum += high
        if NOTES:
            largest = tl.maximum(largest, tl.maximum(tl.abs(low), tl.abs(high)))
    if NOTES:
        tl.atomic_max(amax, tl.max(largest))
    at = sums + tl.program_id(1) * columns + column * 2 * HALF + tl.arange(0, HALF)
    tl.store(at, tl.sum(low_sum, 0))
    tl.store(at + HALF, tl.sum(high_sum, 0))


def rotate_(qkv_BTC: Tensor, queries: int, head: int, rotary: tuple[Tensor, Tensor]) -> None:
    """Applies rotary positions to the queries and keys of the buffer. `rotary`: cosines and sines, (B or 1, 1, T, D)."""
    batch, tokens, columns = qkv_BTC.shape
    cosine, sine = (part.contiguous() for part in rotary)
    stride = cosine.stride(0) if cosine.shape[0] > 1 else 0
    heads = columns // head // (queries + 2) * (queries + 1)
    _rotate[(batch * tokens, heads)](
        qkv_BTC, cosine, sine, tokens, stride, columns, queries + 2, head // 2, num_warps=1
    )


def gather_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, rotary: tuple[Tensor, Tensor] | None, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The buffer's gradient (B·T, columns) from those of (B, heads, T, D), and its column sums; `amax` as elsewhere."""
    batch, heads, tokens, head = dq.shape
    groups = dk.shape[1]
    queries, columns, rows = heads // groups, (heads + 2 * groups) * head, batch * tokens
    dqkv = torch.empty(rows, columns, dtype=dq.dtype, device=dq.device)
    cosine, sine = (None, None) if rotary is None else (part.contiguous() for part in rotary)
    stride = cosine.stride(0) if cosine is not None and cosine.shape[0] > 1 else 0
    parts = [part if part.stride(3) == 1 else part.contiguous() for part in (dq, dk, dv)]
    blocks = groups * (queries + 2)
    programs = column_programs(triton.cdiv(rows, TILE_ROWS), blocks, 16, dq.device)
    sums = torch.empty(programs, columns, dtype=torch.float32, device=dq.device)
    strides = [step for part in parts for step in part.stride()[:3]]
    _gather_qkv[(blocks, programs)](
        *parts, dqkv, sums, amax, cosine, sine, stride, rows, tokens, columns, *strides,
        queries, head // 2, rotary is not None, amax is not None, TILE_ROWS, num_warps=4,
    )  # fmt: skip
    return dqkv, sums.sum(0)
