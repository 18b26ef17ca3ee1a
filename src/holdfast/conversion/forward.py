"""Two plain forwards in double precision, written down twice on purpose: one for Megatron's layout, one for Hugging Face's.

The invariant: they share nothing but arithmetic. A wrong row order, transposition, offset, activation or epsilon in a conversion
makes them differ by far more than rounding. Weights are read tensor by tensor, so the largest layer is the memory needed.

Shapes: T tokens, H hidden, N heads, G query groups, D head width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.conversion.model import OUTPUT_LAYER, WORD_EMBEDDINGS, Architecture
from holdfast.conversion.tensors import Tensor

Array = NDArray[np.float64]
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


def rows_of(table: Tensor, ids: Ids) -> Array:
    return np.stack([table.rows(int(i), int(i) + 1).floats()[0] for i in ids])


def vocabulary_logits(x_TH: Array, table: Tensor, size: int) -> Array:
    """Logits against a vocabulary table, a few thousand rows at a time."""
    blocks = (
        table.rows(start, min(size, start + VOCABULARY_BLOCK)).floats() for start in range(0, size, VOCABULARY_BLOCK)
    )
    return np.concatenate([x_TH @ block.T for block in blocks], axis=1)


# Megatron's layout


def megatron_forward(arch: Architecture, tensors: Mapping[str, Tensor], ids: Ids) -> dict[str, Array]:
    """`logits` [T, V] of a canonical model; for BERT also `sentence` logits."""
    model = _Canonical(arch, tensors)
    x = rows_of(tensors[WORD_EMBEDDINGS], ids)
    if arch.positions == "learned_absolute":
        x = x + rows_of(tensors["embedding.position_embeddings.weight"], np.arange(len(ids)))
    if arch.family == "bert":
        x = x + rows_of(tensors["embedding.tokentype_embeddings.weight"], np.zeros_like(ids))
    if arch.post_norm:
        x = model.norm("embedding.layernorm", x)
    for index in range(arch.num_layers):
        x = model.layer(f"{arch.stack}.layers.{index}", x)
    if not arch.post_norm:
        x = model.norm(f"{arch.stack}.final_layernorm", x)
    size = arch.vocabulary()
    if arch.family == "gpt":
        return {"logits": vocabulary_logits(x, tensors[WORD_EMBEDDINGS if arch.tied else OUTPUT_LAYER], size)}
    head = {"gelu": gelu, "gelu_tanh": gelu_tanh}[arch.head_activation]
    hidden = model.norm("lm_head.layer_norm", head(model.linear("lm_head.dense", x)))
    bias = tensors["output_layer.bias"].rows(0, size).floats()
    found = {"hidden": x, "logits": vocabulary_logits(hidden, tensors[WORD_EMBEDDINGS], size) + bias}
    if arch.binary_head:
        found["sentence"] = model.linear("binary_head", np.tanh(model.linear("pooler.dense", x[:1])))
    return found


class _Canonical:
    def __init__(self, arch: Architecture, tensors: Mapping[str, Tensor]) -> None:
        self._arch, self._tensors = arch, tensors

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self._tensors[f"{name}.weight"].floats().T
        bias = self._tensors.get(f"{name}.bias")
        return y if bias is None else y + bias.floats()

    def norm(self, name: str, x: Array) -> Array:
        weight, epsilon = self._tensors[f"{name}.weight"].floats(), self._arch.norm_epsilon
        if self._arch.normalization == "RMSNorm":
            return rms_norm(x, weight, epsilon)
        return layer_norm(x, weight, self._tensors[f"{name}.bias"].floats(), epsilon)

    def layer(self, name: str, x: Array) -> Array:
        if self._arch.post_norm:
            x = self.norm(f"{name}.post_attention_layernorm", x + self.attention(name, x))
            return self.norm(f"{name}.post_mlp_layernorm", x + self.mlp(name, x))
        x = x + self.attention(name, self.norm(f"{name}.input_layernorm", x))
        return x + self.mlp(name, self.norm(f"{name}.pre_mlp_layernorm", x))

    def attention(self, name: str, x: Array) -> Array:
        arch = self._arch
        groups, width = arch.num_query_groups, arch.kv_channels
        per_group = arch.num_attention_heads // groups
        qkv = self.linear(f"{name}.self_attention.linear_qkv", x).reshape(len(x), groups, per_group + 2, width)
        q = qkv[:, :, :per_group].reshape(len(x), -1, width).transpose(1, 0, 2)
        k = np.repeat(qkv[:, :, per_group], per_group, axis=1).transpose(1, 0, 2)
        v = np.repeat(qkv[:, :, per_group + 1], per_group, axis=1).transpose(1, 0, 2)
        if arch.positions == "rope":
            q, k = rotate(q, arch.rotary_base), rotate(k, arch.rotary_base)
        return self.linear(f"{name}.self_attention.linear_proj", attend(q, k, v, arch.family == "gpt"))

    def mlp(self, name: str, x: Array) -> Array:
        if self._arch.activation == "swiglu":
            inner = silu(self.linear(f"{name}.mlp.linear_fc1_gate", x)) * self.linear(f"{name}.mlp.linear_fc1_up", x)
        else:
            activation = {"gelu": gelu, "gelu_tanh": gelu_tanh}[self._arch.activation]
            inner = activation(self.linear(f"{name}.mlp.linear_fc1", x))
        return self.linear(f"{name}.mlp.linear_fc2", inner)


# Hugging Face's layout


def huggingface_forward(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Ids) -> dict[str, Array]:
    """The same from a Hugging Face folder's config.json and tensors, as transformers computes it."""
    kind = {"gpt2": _gpt2, "llama": _llama, "megatron-bert": _bert, "bert": _bert}[str(config["model_type"])]
    return kind(config, _Plain(tensors), ids)


class _Plain:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].floats()

    def linear(self, name: str, x: Array) -> Array:
        bias = self.tensors.get(f"{name}.bias")
        y = x @ self[f"{name}.weight"].T
        return y if bias is None else y + bias.floats()

    def conv1d(self, name: str, x: Array) -> Array:
        return x @ self[f"{name}.weight"] + self[f"{name}.bias"]

    def norm(self, name: str, x: Array, epsilon: float) -> Array:
        return layer_norm(x, self[f"{name}.weight"], self[f"{name}.bias"], epsilon)


def _activation(name: str) -> Callable[[Array], Array]:
    return {"gelu": gelu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh, "gelu_fast": gelu_tanh}[name]


def _heads(x_TW: Array, count: int) -> Array:
    return x_TW.reshape(len(x_TW), count, -1).transpose(1, 0, 2)


def _gpt2(config: Mapping[str, Any], w: _Plain, ids: Ids) -> dict[str, Array]:
    epsilon, count = config["layer_norm_epsilon"], config["n_head"]
    act = _activation(config["activation_function"])
    table = w.tensors["transformer.wte.weight"]
    x = rows_of(table, ids) + w["transformer.wpe.weight"][: len(ids)]
    for index in range(config["n_layer"]):
        p = f"transformer.h.{index}."
        q, k, v = np.split(w.conv1d(f"{p}attn.c_attn", w.norm(f"{p}ln_1", x, epsilon)), 3, axis=-1)
        x = x + w.conv1d(f"{p}attn.c_proj", attend(_heads(q, count), _heads(k, count), _heads(v, count), True))
        x = x + w.conv1d(f"{p}mlp.c_proj", act(w.conv1d(f"{p}mlp.c_fc", w.norm(f"{p}ln_2", x, epsilon))))
    x = w.norm("transformer.ln_f", x, epsilon)
    head = table if config["tie_word_embeddings"] else w.tensors["lm_head.weight"]
    return {"logits": vocabulary_logits(x, head, config["vocab_size"])}


def _llama(config: Mapping[str, Any], w: _Plain, ids: Ids) -> dict[str, Array]:
    epsilon, base = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    count, shared = config["num_attention_heads"], config["num_key_value_heads"]
    table = w.tensors["model.embed_tokens.weight"]
    x = rows_of(table, ids)
    for index in range(config["num_hidden_layers"]):
        p = f"model.layers.{index}."
        y = rms_norm(x, w[f"{p}input_layernorm.weight"], epsilon)
        q = rotate(_heads(w.linear(f"{p}self_attn.q_proj", y), count), base)
        k = rotate(_heads(w.linear(f"{p}self_attn.k_proj", y), shared), base)
        v = _heads(w.linear(f"{p}self_attn.v_proj", y), shared)
        k, v = np.repeat(k, count // shared, axis=0), np.repeat(v, count // shared, axis=0)
        x = x + w.linear(f"{p}self_attn.o_proj", attend(q, k, v, True))
        y = rms_norm(x, w[f"{p}post_attention_layernorm.weight"], epsilon)
        x = x + w.linear(f"{p}mlp.down_proj", silu(w.linear(f"{p}mlp.gate_proj", y)) * w.linear(f"{p}mlp.up_proj", y))
    x = rms_norm(x, w["model.norm.weight"], epsilon)
    head = table if config["tie_word_embeddings"] else w.tensors["lm_head.weight"]
    return {"logits": vocabulary_logits(x, head, config["vocab_size"])}


def _bert(config: Mapping[str, Any], w: _Plain, ids: Ids) -> dict[str, Array]:
    epsilon, count, before = (
        config["layer_norm_eps"],
        config["num_attention_heads"],
        config["model_type"] == "megatron-bert",
    )
    act = _activation(config["hidden_act"])
    table = w.tensors["bert.embeddings.word_embeddings.weight"]
    x = rows_of(table, ids) + w["bert.embeddings.position_embeddings.weight"][: len(ids)]
    x = x + w["bert.embeddings.token_type_embeddings.weight"][0]
    if not before:
        x = w.norm("bert.embeddings.LayerNorm", x, epsilon)
    for index in range(config["num_hidden_layers"]):
        p = f"bert.encoder.layer.{index}."
        y = w.norm(f"{p}attention.ln", x, epsilon) if before else x
        q, k, v = (_heads(w.linear(f"{p}attention.self.{each}", y), count) for each in ("query", "key", "value"))
        x = x + w.linear(f"{p}attention.output.dense", attend(q, k, v, False))
        x = x if before else w.norm(f"{p}attention.output.LayerNorm", x, epsilon)
        y = w.norm(f"{p}ln", x, epsilon) if before else x
        x = x + w.linear(f"{p}output.dense", act(w.linear(f"{p}intermediate.dense", y)))
        x = x if before else w.norm(f"{p}output.LayerNorm", x, epsilon)
    x = w.norm("bert.encoder.ln", x, epsilon) if before else x
    hidden = act(w.linear("cls.predictions.transform.dense", x))
    hidden = w.norm("cls.predictions.transform.LayerNorm", hidden, epsilon)
    found = {"hidden": x, "logits": vocabulary_logits(hidden, table, config["vocab_size"]) + w["cls.predictions.bias"]}
    if "cls.seq_relationship.weight" in w.tensors:
        found["sentence"] = w.linear("cls.seq_relationship", np.tanh(w.linear("bert.pooler.dense", x[:1])))
    return found
