"""Layers of a transformer in double precision: plain arithmetic, shared by the forwards of `--verify`.

Shapes: T tokens, H hidden, N heads, D head width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.conversion.files.raw_tensors import Array, RawTensor

Ids = NDArray[np.int64]
VOCABULARY_BLOCK = 4096

_erf = np.frompyfunc(math.erf, 1, 1)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.asarray(_erf(x / math.sqrt(2.0)), np.float64))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True), np.float64)


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weight + bias, np.float64)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight, np.float64)


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, the rotated share of a head, and the scaling under transformers' names."""

    base: float
    share: float = 1.0
    kind: str = "default"
    factor: float = 1.0
    original: float = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None


def rotate(x_NTD: Array, rope: Rope) -> Array:
    """Rotary positions on the rotated share of each head, halves apart."""
    tokens, width = x_NTD.shape[1], int(x_NTD.shape[2] * rope.share)
    base, factor, attention = rope.base, rope.factor, 1.0
    if rope.kind == "dynamic" and tokens > rope.original:
        base *= (factor * tokens / rope.original - (factor - 1)) ** (width / (width - 2))
    speed = base ** (-np.arange(0, width, 2) / width)
    if rope.kind == "linear":
        speed = speed / factor
    elif rope.kind == "llama3":
        length = 2 * math.pi / speed
        smooth = (rope.original / length - rope.low) / (rope.high - rope.low)
        between = (1 - smooth) * speed / factor + smooth * speed
        slow, fast = length > rope.original / rope.low, length < rope.original / rope.high
        speed = np.where(slow, speed / factor, np.where(fast, speed, between))
    elif rope.kind == "yarn":
        ends = [
            width * math.log(rope.original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (rope.fast, rope.slow)
        ]
        first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
        ramp = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
        speed = speed * (1 - ramp) + speed / factor * ramp
        attention = 0.1 * math.log(factor) + 1 if rope.attention is None else rope.attention
    angles = np.arange(tokens)[:, None] * speed
    cosine, sine = (np.tile(wave(angles), 2) * attention for wave in (np.cos, np.sin))
    turned, kept = x_NTD[..., :width], x_NTD[..., width:]
    left, right = np.split(turned, 2, axis=-1)
    turned = turned * cosine + np.concatenate([-right, left], -1) * sine
    return np.asarray(np.concatenate([turned, kept], -1), np.float64)


def softcap(x: Array, bound: float | None) -> Array:
    """Values bounded by a tanh; None or 0: as they are."""
    return np.asarray(np.tanh(x / bound) * bound, np.float64) if bound else x


def attend(
    q_NTD: Array, k_NTD: Array, v_NTD: Array, causal: bool, window: int | None = None, divisor: float | None = None,
    bound: float | None = None,
) -> Array:  # fmt: skip
    """Softmax attention, heads joined again: [T, N·D]. `window`: how many tokens before it a token attends to.

    Scores are divided by the square root of `divisor` (None: D) and bounded by `bound`.
    """
    scores = softcap(q_NTD @ k_NTD.transpose(0, 2, 1) / math.sqrt(divisor or q_NTD.shape[-1]), bound)
    if causal:
        tokens = scores.shape[-1]
        near = True if window is None else ~np.tri(tokens, k=-window - 1, dtype=bool)
        scores = np.where(np.tri(tokens, dtype=bool) & near, scores, -np.inf)
    mixed = softmax(scores) @ v_NTD
    return mixed.transpose(1, 0, 2).reshape(mixed.shape[1], -1)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}
GATES: dict[str, Callable[[Array], Array]] = {"swiglu": silu, "geglu": gelu, "geglu_tanh": gelu_tanh}


def rows_of(table: RawTensor, ids: Ids) -> Array:
    return np.stack([table.rows(int(i), int(i) + 1)[0] for i in ids])


def vocabulary_logits(x_TH: Array, tables: Sequence[RawTensor], size: int) -> Array:
    """Logits against a vocabulary table in one or more shards, a few thousand rows at a time."""
    blocks, at = [], 0
    for table in tables:
        rows = min(table.shape[0], size - at)
        for start in range(0, rows, VOCABULARY_BLOCK):
            blocks.append(x_TH @ table.rows(start, min(rows, start + VOCABULARY_BLOCK)).T)
        at += table.shape[0]
    return np.concatenate(blocks, axis=1)
