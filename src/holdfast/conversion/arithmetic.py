"""Layers of a transformer in double precision: plain arithmetic, shared by the forwards of `--verify`.

Shapes: T tokens, H hidden, N heads, D head width.
"""

import math
from collections.abc import Callable, Sequence

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


def rotate(x_NTD: Array, base: float) -> Array:
    """Rotary positions, halves apart."""
    tokens, width = x_NTD.shape[1:]
    angles = np.arange(tokens)[:, None] * base ** (-np.arange(0, width, 2) / width)
    cosine, sine = np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2)
    left, right = np.split(x_NTD, 2, axis=-1)
    return np.asarray(x_NTD * cosine + np.concatenate([-right, left], -1) * sine, np.float64)


def attend(q_NTD: Array, k_NTD: Array, v_NTD: Array, causal: bool) -> Array:
    """Softmax attention, heads joined again: [T, N·D]."""
    scores = q_NTD @ k_NTD.transpose(0, 2, 1) / math.sqrt(q_NTD.shape[-1])
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    mixed = softmax(scores) @ v_NTD
    return mixed.transpose(1, 0, 2).reshape(mixed.shape[1], -1)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}


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
