"""Attention of one query per head over the cached keys, split over the keys so that a few sequences fill the device.

A program takes the query heads of one group and a share of one sequence's old keys; the first share also takes the key and value
of the newest token, which the kernel before this one wrote. Each row of a tile keeps its own running maximum, sum and weighted
values over its keys, so that the loop over keys needs no exchange between threads; the rows are merged once at the end.

Shapes: Q query heads of a group, S keys in a tile, D head width. See decode_linear.py for programmatic dependent launch (PDL).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def load_old(cache, first, last, HEAD: tl.constexpr, S: tl.constexpr, D: tl.constexpr):
    """(1, S, D) of the cache, zero from `last` on."""
    key = first + tl.arange(0, S)[None, :, None]
    column = tl.arange(0, D)[None, None, :]
    return tl.load(cache + key.to(tl.int64) * HEAD + column, mask=(key < last) & (column < HEAD), other=0.0)


@triton.jit
def attend_tile(query, key, value, first, last, top, total, acc, S: tl.constexpr):
    """Adds one tile of keys to each row's running softmax: top and total (Q, S), acc (Q, S, D)."""
    score = tl.sum(query * key.to(tl.float32), 2)
    score = tl.where((first + tl.arange(0, S) < last)[None, :], score, float("-inf"))
    highest = tl.maximum(top, score)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    old, new = tl.exp(top - finite), tl.exp(score - finite)
    acc = acc * old[:, :, None] + new[:, :, None] * value.to(tl.float32)
    return highest, total * old + new, acc


@triton.jit
def decode_attention(
    query, keys, values, positions, out, lse, batch_stride, group_stride, scale,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr,
    Q: tl.constexpr, S: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (SPLITS, batch, heads · D), each split normalised, and its log-sum-exp (SPLITS, batch, heads)."""
    if PDL:
        gdc_launch_dependents()
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch = tl.num_programs(0)
    keys += row * batch_stride + group * group_stride
    values += row * batch_stride + group * group_stride
    position = tl.load(positions + row).to(tl.int32)
    share = (position + SPLITS - 1) // SPLITS
    begin = split * share
    end = tl.minimum(begin + share, position)
    key, value = load_old(keys, begin, end, HEAD, S, D), load_old(values, begin, end, HEAD, S, D)
    if PDL:
        gdc_wait()
    head = tl.arange(0, Q)[:, None, None]
    column = tl.arange(0, D)[None, None, :]
    at = ((row * GROUPS + group) * PER_GROUP + head) * HEAD + column
    inside = (head < PER_GROUP) & (column < HEAD)
    q = tl.load(query + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32) * scale
    newest = position.to(tl.int64) * HEAD + column
    k = tl.load(keys + newest, mask=column < HEAD, other=0.0, cache_modifier=".cg").to(tl.float32)
    v = tl.load(values + newest, mask=column < HEAD, other=0.0, cache_modifier=".cg").to(tl.float32)
    # the first row of the first split begins with the newest token, all other rows with nothing
    fresh = (tl.arange(0, S)[None, :] == 0) & (split == 0)
    top = tl.where(fresh, tl.sum(q * k, 2), float("-inf"))
    total = tl.where(fresh, 1.0, tl.zeros((Q, S), tl.float32))
    acc = tl.where(fresh[:, :, None], v, tl.zeros((Q, S, D), tl.float32))
    top, total, acc = attend_tile(q, key, value, begin, end, top, total, acc, S)
    for first in tl.range(begin + S, end, S, num_stages=STAGES):
        key, value = load_old(keys, first, end, HEAD, S, D), load_old(values, first, end, HEAD, S, D)
        top, total, acc = attend_tile(q, key, value, first, end, top, total, acc, S)
    highest = tl.max(top, 1)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(top - finite[:, None])
    sums = tl.sum(total * weight, 1)
    result = tl.sum(acc * weight[:, :, None], 1) / tl.where(sums == 0.0, 1.0, sums)[:, None]
    head, column = tl.arange(0, Q)[:, None], tl.arange(0, D)[None, :]
    at = ((split * batch + row) * GROUPS + group) * PER_GROUP + head
    inside = (head < PER_GROUP) & (column < HEAD)
    tl.store(out + at * HEAD + column, result.to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:
        head = tl.arange(0, Q)
        at = ((split * batch + row) * GROUPS + group) * PER_GROUP + head
        tl.store(lse + at, highest + tl.log(sums), mask=head < PER_GROUP)


@triton.jit
def decode_merge(x, lse, out, SPLITS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out (batch, heads, HEAD) from the attention splits x (SPLITS, batch, heads, HEAD)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, heads = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, SPLITS) * heads + head
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(lse + at, cache_modifier=".cg")
    value = tl.load(x + at[:, None] * HEAD + column, mask=column < HEAD, other=0.0, cache_modifier=".cg")
    weight = tl.exp(weight - tl.max(weight, 0))
    value = tl.sum(value * weight[:, None], 0) / tl.sum(weight, 0)
    column = tl.arange(0, BLOCK)
    tl.store(out + head * HEAD + column, value.to(out.dtype.element_ty), mask=column < HEAD)
