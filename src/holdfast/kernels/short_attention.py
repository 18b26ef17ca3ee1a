"""Attention of short sequences, forward and backward: one program holds all scores of one head in registers.

With at most `LONGEST` tokens a head's queries, keys and values fit on the chip, so that each is read once, and gradients are
written once, in place of the several passes that kernels for long sequences need. Nothing is added up by several programs:
results repeat bit for bit.

Tensors are views (B, H, T, D) with any strides but the last, which is 1: parts of one q/k/v buffer. Each query head has a
key head of its own. Arithmetic is fp32, factors of products are in the compute type.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.grid import power_of_two, processors, shared_memory

LONGEST = 128
FORWARD_WARPS, BACKWARD_WARPS = 8, 8
STAGES = 3
"""Heads that a program of backward has on the chip: the one that it computes, and those that it loads meanwhile."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(tensor, batch, head, batch_stride, head_stride, token_stride, T: tl.constexpr, D: tl.constexpr):
    """Addresses of one head's (tokens, columns)."""
    start = tensor + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return start + tl.arange(0, T)[:, None] * token_stride + tl.arange(0, D)[None, :]


@triton.jit
def _short_attention(
    q, k, v, bias, out, lse, tokens, scale, qb, qh, qt, kb, kh, kt, vb, vh, vt, rb, rh, rt, bias_stride,
    BIASED: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, T)
    inside = token[:, None] < tokens
    query = tl.load(_place(q, batch, head, qb, qh, qt, T, D), mask=inside, other=0.0)
    key = tl.load(_place(k, batch, head, kb, kh, kt, T, D), mask=inside, other=0.0)
    value = tl.load(_place(v, batch, head, vb, vh, vt, T, D), mask=inside, other=0.0)
    scores = tl.dot(query, tl.trans(key)) * scale
    if BIASED:
        scores += tl.load(bias + batch * bias_stride + token, mask=token < tokens, other=float("-inf"))[None, :].to(
            tl.float32
        )
    else:
        scores = tl.where(token[None, :] < tokens, scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(token[None, :] <= token[:, None], scores, float("-inf"))
    highest = tl.max(scores, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # a token that attends to none
    weights = tl.exp2((scores - highest[:, None]) * LOG2_E)
    total = tl.maximum(tl.sum(weights, 1), 1e-30)
    result = tl.dot(weights.to(value.dtype), value) / total[:, None]
    tl.store(_place(out, batch, head, rb, rh, rt, T, D), result.to(out.dtype.element_ty), mask=inside)
    at = (batch * tl.num_programs(0) + head).to(tl.int64) * tokens + token
    tl.store(lse + at, highest + tl.log(total), mask=token < tokens)


@triton.jit
def _short_attention_backward(
    q, k, v, bias, dout, lse, dq, dk, dv, sum_q, sum_k, sum_v, tokens, scale, heads, programs,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, dqb, dqh, dqt, dkb, dkh, dkt, dvb, dvh, dvt,
    sqb, sqh, skb, skh, svb, svh, bias_stride,
    BIASED: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes several heads one after the other and loads the next one meanwhile. Scores are transposed, (keys,
    queries): so they and their gradient are first factors of products as they are, and only the product that gives the query's
    gradient turns one of them."""
    token, column = tl.arange(0, T), tl.arange(0, D)
    inside = token[:, None] < tokens
    for number in tl.range(tl.program_id(0), programs, tl.num_programs(0), num_stages=STAGES):
        head, batch = number % heads, number // heads
        query = tl.load(_place(q, batch, head, qb, qh, qt, T, D), mask=inside, other=0.0)
        key = tl.load(_place(k, batch, head, kb, kh, kt, T, D), mask=inside, other=0.0)
        value = tl.load(_place(v, batch, head, vb, vh, vt, T, D), mask=inside, other=0.0)
        gradient = tl.load(_place(dout, batch, head, gb, gh, gt, T, D), mask=inside, other=0.0)
        row = (batch * heads + head).to(tl.int64) * tokens
        normalizer = tl.load(lse + row + token, mask=token < tokens, other=0.0)
        scores = tl.dot(key, tl.trans(query)) * scale
        if BIASED:
            scores += tl.load(bias + batch * bias_stride + token, mask=token < tokens, other=float("-inf"))[:, None].to(
                tl.float32
            )
        else:
            scores = tl.where(token[:, None] < tokens, scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(token[:, None] <= token[None, :], scores, float("-inf"))
        weights = tl.exp2((scores - normalizer[None, :]) * LOG2_E)
        dvalue = tl.dot(weights.to(gradient.dtype), gradient)
        tl.store(_place(dv, batch, head, dvb, dvh, dvt, T, D), dvalue.to(dv.dtype.element_ty), mask=inside)
        tl.store(sum_v + batch.to(tl.int64) * svb + head * svh + column, tl.sum(dvalue, 0))
        dweights = tl.dot(value, tl.trans(gradient))
        mean = tl.sum(weights * dweights, 0)
        dscores = (weights * (dweights - mean[None, :]) * scale).to(query.dtype)
        dkey = tl.dot(dscores, query)
        tl.store(_place(dk, batch, head, dkb, dkh, dkt, T, D), dkey.to(dk.dtype.element_ty), mask=inside)
        tl.store(sum_k + batch.to(tl.int64) * skb + head * skh + column, tl.sum(dkey, 0))
        dquery = tl.dot(tl.trans(dscores), key)
        tl.store(_place(dq, batch, head, dqb, dqh, dqt, T, D), dquery.to(dq.dtype.element_ty), mask=inside)
        tl.store(sum_q + batch.to(tl.int64) * sqb + head * sqh + column, tl.sum(dquery, 0))


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """(attention, log of the softmax's normalizer); `out` takes the first. `bias` is added to the scores, (B or 1, 1, 1, T)."""
    batch, heads, tokens, head = q.shape
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    strides = [step for part in (q, k, v, out) for step in part.stride()[:3]]
    _short_attention[(heads, batch)](
        q, k, v, bias, out, lse, tokens, head**-0.5, *strides, _bias_stride(bias),
        bias is not None, causal, _block(tokens), head, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return out, lse


def short_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, lse: Tensor,
    into: tuple[Tensor, Tensor, Tensor], sums: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v to the views `into`, and their sums over each sample's tokens to `sums`, (B, H, 1, D) in
    fp32."""
    batch, heads, tokens, head = q.shape
    strides = [step for part in (q, k, v, dout, *into) for step in part.stride()[:3]]
    sum_strides = [step for part in sums for step in part.stride()[:2]]
    block = _block(tokens)
    room = shared_memory(q.device) - 2 * block * block  # for the gradient of the scores, which is turned
    stages = max(1, min(STAGES, room // (8 * block * head + 512)))
    grid = (min(heads * batch, processors(q.device)),)
    _short_attention_backward[grid](
        q, k, v, bias, dout, lse, *into, *sums, tokens, head**-0.5, heads, heads * batch, *strides, *sum_strides,
        _bias_stride(bias), bias is not None, causal, block, head, stages, num_warps=BACKWARD_WARPS,
    )  # fmt: skip


def takes(tokens: int, head: int, bias: Tensor | None) -> bool:
    """Whether the kernels compute this: short, and with a bias per key at most."""
    return tokens <= LONGEST and head in (64, 128) and (bias is None or bias.shape[1:3] == (1, 1))


def _block(tokens: int) -> int:
    return max(16, power_of_two(tokens))


def _bias_stride(bias: Tensor | None) -> int:
    return 0 if bias is None or bias.shape[0] == 1 else bias.stride(0)
