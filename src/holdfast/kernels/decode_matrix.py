"""Linear maps of one decoding step for several rows, on the tensor cores: a program streams its weights through shared memory.

Norms are kernels of their own here, since every program reads all rows. Where the outputs are too few for the device, the inputs
are divided too: such a product gives partial sums, and the norm that follows adds them to the residual stream in a fixed order.

Shapes: B rows, N outputs, K inputs, D head width. See decode_linear.py for programmatic dependent launch (PDL).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from holdfast.kernels.decode_linear import (
    SWIGLU,
    activate,
    load_norm,
    load_row,
    load_scale_and_bias,
    moments,
    qkv_rows,
    rotate_halves,
    store_heads,
    widen,
)


@triton.jit
def prefetch(weight, rows, first, last, K: tl.constexpr, SPAN: tl.constexpr):
    """Starts to bring the inputs `first` to `first + SPAN` of the rows into the L2 cache, a line of 64 values at a time."""
    column = tl.minimum(first + tl.arange(0, SPAN // 64) * 64, K - 1)
    at = weight + tl.minimum(rows, last).to(tl.int64)[:, None] * K + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def multiply_add(weights, value, acc, WEIGHTS_FIRST: tl.constexpr):
    """The tensor cores take 64 rows of the first factor at a time: the weights', or those of many sequences."""
    if WEIGHTS_FIRST:
        return tl.dot(weights, tl.trans(value), acc, input_precision="ieee")
    else:
        return tl.dot(value, tl.trans(weights), acc, input_precision="ieee")


@triton.jit
def matrix_product(
    x, weight, twin, rows, twin_rows, live, batch, first,
    PAIR: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, TYPE: tl.constexpr,
    B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """x times the rows of `weight`, and with PAIR those of `twin`, over the inputs `first` to `first + SPAN`: two (BN, B)."""
    acc = tl.zeros((BN, B) if WEIGHTS_FIRST else (B, BN), tl.float32)
    other = acc
    row = tl.arange(0, B)[:, None]
    at = rows.to(tl.int64)[:, None] * K
    twin_at = twin_rows.to(tl.int64)[:, None] * K
    for start in tl.range(0, SPAN, BK, num_stages=STAGES):
        column = first + start + tl.arange(0, BK)
        inside = column < K
        at_x = row * K + column[None, :]
        value = tl.load(x + at_x, mask=(row < batch) & inside[None, :], other=0.0, cache_modifier=".cg")
        live_tile = live[:, None] & inside[None, :]
        weights = tl.load(weight + at + column[None, :], mask=live_tile, other=0.0)
        acc = multiply_add(widen(weights).to(TYPE), value, acc, WEIGHTS_FIRST)
        if PAIR:
            weights = tl.load(twin + twin_at + column[None, :], mask=live_tile, other=0.0)
            other = multiply_add(widen(weights).to(TYPE), value, other, WEIGHTS_FIRST)
    return (acc, other) if WEIGHTS_FIRST else (tl.trans(acc), tl.trans(other))


@triton.jit
def decode_matrix(
    x, weight, twin, scale, twin_scale, bias, twin_bias, out, batch, outputs,
    OUTPUT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    TYPE: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out (batch, outputs), or with PARTIAL the sums (K / SPAN, batch, outputs) without bias."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows < outputs
    part = tl.program_id(1)
    factor, term = load_scale_and_bias(scale, bias, rows, live, SCALED, BIASED)
    if OUTPUT == SWIGLU:
        twin_factor, twin_term = load_scale_and_bias(twin_scale, twin_bias, rows, live, SCALED, BIASED)
    if PDL:
        prefetch(weight, rows, part * SPAN, outputs - 1, K, SPAN)
        if OUTPUT == SWIGLU:
            prefetch(twin, rows, part * SPAN, outputs - 1, K, SPAN)
        gdc_wait()
    value, up = matrix_product(
        x, weight, twin, rows, rows, live, batch, part * SPAN, OUTPUT == SWIGLU, K, SPAN, TYPE, B, BN, BK, STAGES, WEIGHTS_FIRST
    )  # fmt: skip
    value = value * factor + term
    if OUTPUT == SWIGLU:
        up = up * twin_factor + twin_term
    value = activate(value, up, OUTPUT)
    row = tl.arange(0, B)[None, :]
    at = (part * batch + row).to(tl.int64) * outputs + rows[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live[:, None] & (row < batch))


@triton.jit
def decode_matrix_qkv(
    x, weight, scale, bias, query, keys, values, positions, cosines, sines, batch, outputs, batch_stride, group_stride,
    ROTARY: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, HEAD: tl.constexpr, TYPE: tl.constexpr,
    B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Queries, and the new keys and values in the cache, as `decode_qkv`."""
    if PDL:
        gdc_launch_dependents()
    rows, twin_rows, live, column = qkv_rows(outputs, ROTARY, HEAD, BN)
    row = tl.arange(0, B)[None, :]
    position = tl.load(positions + row, mask=row < batch, other=0).to(tl.int64)
    if ROTARY:
        twin_factor, twin_term = load_scale_and_bias(scale, bias, twin_rows, live, SCALED, BIASED)
    factor, term = load_scale_and_bias(scale, bias, rows, live, SCALED, BIASED)
    if PDL:
        prefetch(weight, rows, 0, outputs - 1, K, SPAN)
        if ROTARY:
            prefetch(weight, twin_rows, 0, outputs - 1, K, SPAN)
        gdc_wait()
    value, twin = matrix_product(
        x, weight, weight, rows, twin_rows, live, batch, 0, ROTARY, K, SPAN, TYPE, B, BN, BK, STAGES, WEIGHTS_FIRST
    )
    value = value * factor + term
    if ROTARY:
        angle = position * (HEAD // 2) + column[:, None]
        value, twin = rotate_halves(value, twin * twin_factor + twin_term, rows, angle, cosines, sines, HEAD, PER_GROUP)
        store_heads(
            twin, twin_rows, live, query, keys, values, position, batch, batch_stride, group_stride,
            HEADS, PER_GROUP, HEAD, B,
        )  # fmt: skip
    store_heads(
        value, rows, live, query, keys, values, position, batch, batch_stride, group_stride, HEADS, PER_GROUP, HEAD, B
    )


@triton.jit
def decode_norm(
    x, partial, bias, gain, shift, out, eps,
    INPUT: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds PARTS partial sums and their bias to the residual stream x (batch, K), and writes its norm to out."""
    if PDL:
        gdc_launch_dependents()
    row, batch = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < K
    first_gain, first_shift = load_norm(gain, shift, K, BLOCK, INPUT)
    term = tl.zeros((BLOCK,), tl.float32)
    if BIASED:
        term = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = load_row(x + row * K, 0, K, BLOCK)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            term += load_row(partial + (part * batch + row) * K, 0, K, BLOCK)
        value += term
        tl.store(x + row * K + column, value, mask=inside)
    mean, factor = moments(value, value * value, eps, K, INPUT)
    value = (value - mean) * factor * first_gain + first_shift
    tl.store(out + row * K + column, value.to(out.dtype.element_ty), mask=inside)
