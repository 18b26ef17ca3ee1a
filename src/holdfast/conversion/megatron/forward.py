"""Megatron's forward in double precision, straight from the ranks' tensors: the second reading path of `--verify`.

The invariant: it shares nothing with the reader but the opening of files. No canonical name, no joined tensor, no reordered row,
no Architecture: every tensor rank computes its own heads and columns with the row order of the file's version, and the ranks'
results are added, as in training. A mistake of the reader in any of these makes the logits differ.

Shapes: T tokens, H hidden, N heads of a rank, G its query groups, D head width.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.conversion.arithmetic import (
    ACTIVATIONS,
    GATES,
    Ids,
    Rope,
    attend,
    layer_norm,
    rms_norm,
    rotate,
    softcap,
    vocabulary_logits,
)
from holdfast.conversion.files.raw_tensors import Array, RawTensor
from holdfast.system.errors import HoldfastError

StageTensors = Sequence[Mapping[str, RawTensor]]
"""One pipeline stage (or chunk of one): the tensors of each tensor rank, by the file's own names."""

QKV = ("linear_qkv", "query_key_value", "layernorm_qkv")
PROJECTION = ("linear_proj", "self_attention.dense", "attention.dense", "self_attention.proj")
FIRST = ("mlp.linear_fc1", "mlp.dense_h_to_4h", "layernorm_mlp.fc1")
SECOND = ("mlp.linear_fc2", "mlp.dense_4h_to_h", "layernorm_mlp.fc2")
INPUT_NORM = (
    "input_layernorm", "input_norm", "self_attention.linear_qkv.layer_norm", "self_attention.layernorm_qkv.layer_norm",
)  # fmt: skip
MLP_NORM = (
    "pre_mlp_layernorm", "post_attention_layernorm", "post_attention_norm", "mlp.linear_fc1.layer_norm",
    "layernorm_mlp.layer_norm",
)  # fmt: skip
FINAL_NORM = ("final_layernorm", "final_norm")


@dataclass(frozen=True)
class ForwardSettings:
    """The settings of the source that decide its function, read a second time."""

    heads: int
    groups: int
    width: int
    epsilon: float
    activation: str
    head_activation: str
    rms: bool = False
    rope: Rope | None = None
    window: int | None = None
    skip: tuple[int, ...] = ()
    """Layers without the window: every skip[0]-th, or those with 0."""
    divisor: float | None = None
    """Of the attention scores, under a square root."""
    score_bound: float = 0.0
    logit_bound: float = 0.0
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    word_factor: float = 1.0
    block_norms: bool = False
    parallel: bool = False
    tied: bool = True
    bert: bool = False
    post_norm: bool = False
    version: float = 3.0


def find(tensors: Mapping[str, RawTensor], names: Sequence[str], kind: str) -> RawTensor | None:
    """The tensor of one of these names, with any prefix; `kind` is weight or bias."""
    for name in names:
        for key, raw in tensors.items():
            if re.search(rf"(^|\.){re.escape(name)}[._]{kind}$", key):
                return raw
    return None


class MegatronForward:
    def __init__(self, settings: ForwardSettings, parts: Sequence[StageTensors]) -> None:
        self._s, self._parts = settings, parts

    def run(self, ids: Ids, size: int, head: str | None) -> dict[str, Array]:
        """`logits` [T, size]; for BERT also `hidden` and `sentence`. `head`: another activation for BERT's head than its own."""
        s, first, last = self._s, self._parts[0], self._parts[-1]
        words = [self._need(rank, ["word_embeddings"]) for rank in first]
        rows = words[0].shape[0]
        x = np.stack([words[int(i) // rows].rows(int(i) % rows, int(i) % rows + 1)[0] for i in ids]) * s.word_factor
        if s.rope is None:
            x = x + self._need(first[0], ["position_embeddings"]).rows(0, len(ids))
        if s.bert:
            x = x + self._need(first[0], ["tokentype_embeddings"]).rows(0, 1)
        x = self._norm(first[0], ["embedding.layernorm"], x) if s.post_norm else x
        for number, ranks in enumerate(ranks for part in self._parts for ranks in _layers(part)):
            x = self._layer(ranks, x, number)
        x = x if s.post_norm else self._norm(last[0], FINAL_NORM, x)
        table = words if s.tied else [self._need(rank, ["output_layer"]) for rank in last]
        if not s.bert:
            return {"logits": softcap(vocabulary_logits(x, table, size), s.logit_bound)}
        y = ACTIVATIONS[head or s.head_activation](self._linear(last[0], ["lm_head.dense"], x))
        y = self._norm(last[0], ["lm_head.layernorm", "lm_head.layer_norm"], y)
        biases = [self._need(rank, ["lm_head", "output_layer"], "bias").whole() for rank in last]
        found = {"hidden": x, "logits": vocabulary_logits(y, table, size) + np.concatenate(biases)[:size]}
        if find(last[0], ["binary_head"], "weight") is not None:
            pooled = np.tanh(self._linear(last[0], ["pooler.dense"], x[:1]))
            found["sentence"] = self._linear(last[0], ["binary_head"], pooled)
        return found

    def _need(self, tensors: Mapping[str, RawTensor], names: Sequence[str], kind: str = "weight") -> RawTensor:
        raw = find(tensors, names, kind)
        if raw is None:
            raise HoldfastError(f"verification failed: the source has no {names[0]}.{kind}")
        return raw

    def _linear(self, tensors: Mapping[str, RawTensor], names: Sequence[str], x: Array) -> Array:
        bias = find(tensors, names, "bias")
        y = x @ self._need(tensors, names).whole().T
        return y if bias is None else y + bias.whole()

    def _row_parallel(self, ranks: StageTensors, names: Sequence[str], inputs: Sequence[Array]) -> Array:
        """Each rank multiplies its columns; the bias is added once, to the sum."""
        products = [x @ self._need(rank, names).whole().T for rank, x in zip(ranks, inputs, strict=True)]
        bias = find(ranks[0], names, "bias")
        total = np.sum(products, axis=0)
        return np.asarray(total if bias is None else total + bias.whole(), np.float64)

    def _norm(self, tensors: Mapping[str, RawTensor], names: Sequence[str], x: Array) -> Array:
        weight = self._need(tensors, names).whole() + self._s.norm_offset
        if self._s.rms:
            return rms_norm(x, weight, self._s.epsilon)
        return layer_norm(x, weight, self._need(tensors, names, "bias").whole(), self._s.epsilon)

    def _layer(self, ranks: StageTensors, x: Array, number: int) -> Array:
        if self._s.post_norm:
            x = self._norm(ranks[0], ["post_attention_layernorm"], x + self._attention(ranks, x, number))
            return self._norm(ranks[0], ["post_mlp_layernorm"], x + self._mlp(ranks, x))
        attended = self._attention(ranks, self._norm(ranks[0], INPUT_NORM, x), number)
        if self._s.block_norms:
            attended = self._norm(ranks[0], ["post_attention_layernorm"], attended)
        entered = x if self._s.parallel else x + attended
        result = self._mlp(ranks, self._norm(ranks[0], MLP_NORM, entered))
        if self._s.block_norms:
            result = self._norm(ranks[0], ["post_mlp_layernorm"], result)
        return x + attended + result

    def _window(self, number: int) -> int | None:
        skip = self._s.skip
        everything = len(skip) > 1 and not skip[number]
        if len(skip) == 1:
            everything = number % skip[0] == skip[0] - 1
        return None if everything else self._s.window

    def _attention(self, ranks: StageTensors, x: Array, number: int) -> Array:
        s, mixed = self._s, []
        for rank in ranks:
            q, k, v = self._heads(self._linear(rank, QKV, x), len(ranks))
            if find(rank, ["q_layernorm"], "weight") is not None:
                q, k = self._norm(rank, ["q_layernorm"], q), self._norm(rank, ["k_layernorm"], k)
            if s.rope is not None:
                q, k = rotate(q, s.rope), rotate(k, s.rope)
            k, v = (np.repeat(part, q.shape[0] // k.shape[0], axis=0) for part in (k, v))
            mixed.append(attend(q, k, v, not s.bert, self._window(number), s.divisor, s.score_bound))
        return self._row_parallel(ranks, PROJECTION, mixed)

    def _heads(self, y: Array, ranks: int) -> tuple[Array, Array, Array]:
        """Queries [N, T, D], keys and values [G, T, D] of one rank, by the row order of the checkpoint's version."""
        s, tokens = self._s, len(y)
        if s.version < 2:
            heads = s.heads // ranks
            shape, axis = ((tokens, 3, heads, s.width), 1) if s.version < 1 else ((tokens, heads, s.width, 3), 3)
            q, k, v = (part.transpose(1, 0, 2) for part in np.moveaxis(y.reshape(shape), axis, 0))
            return q, k, v
        groups, each = s.groups // ranks, s.heads // s.groups
        y = y.reshape(tokens, groups, each + 2, s.width)
        q = y[:, :, :each].reshape(tokens, groups * each, s.width)
        return q.transpose(1, 0, 2), y[:, :, each].transpose(1, 0, 2), y[:, :, each + 1].transpose(1, 0, 2)

    def _mlp(self, ranks: StageTensors, x: Array) -> Array:
        inner = []
        for rank in ranks:
            if self._s.activation in ACTIVATIONS:
                inner.append(ACTIVATIONS[self._s.activation](self._linear(rank, FIRST, x)))
                continue
            if find(rank, ["mlp.linear_fc1_gate"], "weight") is not None:
                gate, up = (self._linear(rank, [f"mlp.linear_fc1_{half}"], x) for half in ("gate", "up"))
            else:
                gate, up = np.split(self._linear(rank, FIRST, x), 2, axis=-1)
            inner.append(GATES[self._s.activation](gate) * up)
        return self._row_parallel(ranks, SECOND, inner)


def _layers(part: StageTensors) -> list[StageTensors]:
    """The layers of a stage in order: for each tensor rank the tensors of one layer."""
    found: list[list[dict[str, RawTensor]]] = []
    for rank, tensors in enumerate(part):
        for name, raw in tensors.items():
            match = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name)
            if match:
                while len(found) <= int(match[1]):
                    found.append([{} for _ in part])
                found[int(match[1])][rank][match[2]] = raw
    return list(found)
