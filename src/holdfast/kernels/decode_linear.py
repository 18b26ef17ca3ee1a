"""Linear maps of one decoding step for one row: a vector times a matrix, with what comes before and after it in one kernel.

A step reads every weight once, so a program owns some outputs and reads their weights exactly once. Before the product: a norm
of the residual stream. After it: bias, rotary positions and the cache write; or activation; or the sum with the residual stream,
which is fp32.

Programmatic dependent launch (PDL) starts a kernel while the one before it still runs: a kernel first lets its successor start,
then loads weights, then waits for its predecessor, then reads activations, past the L1 cache, which may hold old values.

Shapes: B rows, N outputs, K inputs, D head width; a tile of weights is (BN, BK).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PLAIN, LAYER_NORM, RMS_NORM = (tl.constexpr(kind) for kind in range(3))
STORE, GELU_TANH, GELU_ERF, SWIGLU, ADD, PARTIAL = (tl.constexpr(kind) for kind in range(6))


@triton.jit
def load_weights(weight, rows, live, chunk, K: tl.constexpr, BK: tl.constexpr):
    """(rows, BK) from column `chunk` on."""
    column = chunk + tl.arange(0, BK)[None, :]
    inside = live[:, None]
    if K % BK:
        inside = inside & (column < K)
    return tl.load(weight + rows.to(tl.int64)[:, None] * K + column, mask=inside, other=0.0)


@triton.jit
def load_columns(x, chunk, K: tl.constexpr, BK: tl.constexpr):
    """(BK) of a constant vector of K, in fp32."""
    column = chunk + tl.arange(0, BK)
    return tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def load_row(x, chunk, K: tl.constexpr, BK: tl.constexpr):
    """(BK) of a row of activations, in fp32."""
    column = chunk + tl.arange(0, BK)
    return tl.load(x + column, mask=column < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def widen(weights):
    """Weights in fp32. 8-bit integers, stored with 128 added, become the low bits of 2²³: conversions are slow."""
    if weights.dtype == tl.uint8:
        return (weights.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        return weights.to(tl.float32)


@triton.jit
def moments(total, square, eps, K: tl.constexpr, INPUT: tl.constexpr):
    """Mean and 1 / deviation of a row, from sums over positions of K."""
    mean = 0.0
    if INPUT == LAYER_NORM:
        mean = tl.sum(total, 0) / K
    variance = tl.maximum(tl.sum(square, 0) / K - mean * mean, 0.0)
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def load_norm(gain, shift, K: tl.constexpr, BK: tl.constexpr, INPUT: tl.constexpr):
    """The first BK columns of a norm's gain and shift, or placeholders."""
    first_gain, first_shift = 1.0, 0.0
    if (INPUT == LAYER_NORM) | (INPUT == RMS_NORM):
        first_gain = load_columns(gain, 0, K, BK)
    if INPUT == LAYER_NORM:
        first_shift = load_columns(shift, 0, K, BK)
    return first_gain, first_shift


@triton.jit
def load_scale_and_bias(scale, bias, rows, live, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """What each output is multiplied by and what is added to it, (N, 1), or placeholders."""
    factor, term = 1.0, 0.0
    if SCALED:
        factor = tl.load(scale + rows, mask=live, other=0.0)[:, None]
    if BIASED:
        term = tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)[:, None]
    return factor, term


@triton.jit
def product(
    x, gain, shift, first_gain, first_shift, weight, twin, first, second, rows, twin_rows, live, eps,
    INPUT: tl.constexpr, PAIR: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The rows of `weight`, and with PAIR those of `twin`, times the input: two (BN, 1). `first...` are the first BK columns."""
    NORMS: tl.constexpr = (INPUT == LAYER_NORM) | (INPUT == RMS_NORM)
    value = load_row(x, 0, K, BK)
    if NORMS:
        total, square = value, value * value
        for chunk in tl.static_range(BK, K, BK):
            more = load_row(x, chunk, K, BK)
            total += more
            square += more * more
        mean, factor = moments(total, square, eps, K, INPUT)
        value = (value - mean) * factor * first_gain + first_shift
    acc = widen(first) * value[None, :]
    other = acc
    if PAIR:
        other = widen(second) * value[None, :]
    for chunk in tl.range(BK, K, BK):
        value = load_row(x, chunk, K, BK)
        if NORMS:
            value = (value - mean) * factor * load_columns(gain, chunk, K, BK)
            if INPUT == LAYER_NORM:
                value += load_columns(shift, chunk, K, BK)
        acc += widen(load_weights(weight, rows, live, chunk, K, BK)) * value[None, :]
        if PAIR:
            other += widen(load_weights(twin, twin_rows, live, chunk, K, BK)) * value[None, :]
    result = tl.sum(acc, 1)[:, None]
    twin_result = tl.sum(other, 1)[:, None] if PAIR else result
    return result, twin_result


@triton.jit
def activate(value, up, OUTPUT: tl.constexpr):
    if OUTPUT == GELU_TANH:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # value · (1 + tanh(inner)) / 2
    elif OUTPUT == GELU_ERF:
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif OUTPUT == SWIGLU:
        return value * up / (1.0 + tl.exp(-value))
    else:
        return value


@triton.jit
def decode_linear(
    x, gain, shift, weight, twin, scale, twin_scale, bias, twin_bias, out, outputs, eps,
    INPUT: tl.constexpr, OUTPUT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (outputs): STORE, an activation, or ADD to what is there."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows < outputs
    first = load_weights(weight, rows, live, 0, K, BK)
    second = load_weights(twin, rows, live, 0, K, BK) if OUTPUT == SWIGLU else first
    first_gain, first_shift = load_norm(gain, shift, K, BK, INPUT)
    factor, term = load_scale_and_bias(scale, bias, rows, live, SCALED, BIASED)
    if OUTPUT == SWIGLU:
        twin_factor, twin_term = load_scale_and_bias(twin_scale, twin_bias, rows, live, SCALED, BIASED)
    if PDL:
        gdc_wait()
    at, inside = out + rows[:, None], live[:, None]
    if OUTPUT == ADD:
        before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    value, up = product(
        x, gain, shift, first_gain, first_shift, weight, twin, first, second, rows, rows, live, eps,
        INPUT, OUTPUT == SWIGLU, K, BK,
    )  # fmt: skip
    value = value * factor + term
    if OUTPUT == SWIGLU:
        up = up * twin_factor + twin_term
    value = activate(value, up, OUTPUT)
    if OUTPUT == ADD:
        value += before
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_heads(
    value, rows, live, query, keys, values, position, batch, batch_stride, group_stride,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, HEAD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Writes (N, B) of the fused projection: queries to (batch, heads, D), keys and values to the cache at each position."""
    rows = rows[:, None]
    group, inner = rows // ((PER_GROUP + 2) * HEAD), rows % ((PER_GROUP + 2) * HEAD)
    slot, column = inner // HEAD, inner % HEAD
    row = tl.arange(0, B)[None, :]
    inside = live[:, None] & (row < batch)
    at = (row * HEADS + group * PER_GROUP + slot) * HEAD + column
    tl.store(query + at, value.to(query.dtype.element_ty), mask=inside & (slot < PER_GROUP))
    at = row.to(tl.int64) * batch_stride + group * group_stride + position * HEAD + column
    tl.store(keys + at, value.to(keys.dtype.element_ty), mask=inside & (slot == PER_GROUP))
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside & (slot == PER_GROUP + 1))


@triton.jit
def rotate_halves(value, twin, rows, angle, cosines, sines, HEAD: tl.constexpr, PER_GROUP: tl.constexpr):
    """The rotated halves (N, B) of queries and keys; values stay as they are."""
    turns = (rows // HEAD % (PER_GROUP + 2) <= PER_GROUP)[:, None]
    cosine = tl.where(turns, tl.load(cosines + angle), 1.0)
    sine = tl.where(turns, tl.load(sines + angle), 0.0)
    return value * cosine - twin * sine, twin * cosine + value * sine


@triton.jit
def qkv_rows(outputs, ROTARY: tl.constexpr, HEAD: tl.constexpr, BN: tl.constexpr):
    """The program's rows of the fused projection and the mask of those that exist. With rotary positions a program owns both
    halves of its columns: rows of the first half, rows of the second, and the columns of the half."""
    first = tl.program_id(0) * BN + tl.arange(0, BN)
    if ROTARY:
        HALF: tl.constexpr = HEAD // 2
        rows = first // HALF * HEAD + first % HALF
        return rows, rows + HALF, first < outputs // 2, first % HALF
    else:
        return first, first, first < outputs, first


@triton.jit
def decode_qkv(
    x, gain, shift, weight, scale, bias, query, keys, values, positions, cosines, sines, outputs, eps,
    batch_stride, group_stride,
    INPUT: tl.constexpr, ROTARY: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    K: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, HEAD: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The query, and the new key and value in the cache."""
    if PDL:
        gdc_launch_dependents()
    rows, twin_rows, live, column = qkv_rows(outputs, ROTARY, HEAD, BN)
    position = tl.load(positions + tl.arange(0, 1)[None, :]).to(tl.int64)
    if ROTARY:
        twin_factor, twin_term = load_scale_and_bias(scale, bias, twin_rows, live, SCALED, BIASED)
    first = load_weights(weight, rows, live, 0, K, BK)
    second = load_weights(weight, twin_rows, live, 0, K, BK) if ROTARY else first
    first_gain, first_shift = load_norm(gain, shift, K, BK, INPUT)
    factor, term = load_scale_and_bias(scale, bias, rows, live, SCALED, BIASED)
    if PDL:
        gdc_wait()
    value, twin = product(
        x, gain, shift, first_gain, first_shift, weight, weight, first, second, rows, twin_rows, live, eps,
        INPUT, ROTARY, K, BK,
    )  # fmt: skip
    value = value * factor + term
    if ROTARY:
        angle = position * (HEAD // 2) + column[:, None]
        value, twin = rotate_halves(value, twin * twin_factor + twin_term, rows, angle, cosines, sines, HEAD, PER_GROUP)
        store_heads(
            twin, twin_rows, live, query, keys, values, position, 1, batch_stride, group_stride, HEADS, PER_GROUP, HEAD, 1
        )  # fmt: skip
    store_heads(
        value, rows, live, query, keys, values, position, 1, batch_stride, group_stride, HEADS, PER_GROUP, HEAD, 1
    )


@triton.jit
def decode_embedding(
    tokens, positions, words, places, x, K: tl.constexpr, LEARNED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """x (batch, K), fp32: the word vectors, plus position vectors where they are learned."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < K
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(words + token * K + column, mask=inside, other=0.0).to(tl.float32)
    if LEARNED:
        position = tl.load(positions + row).to(tl.int64)
        value += tl.load(places + position * K + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * K + column, value, mask=inside)
