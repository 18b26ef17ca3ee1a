"""Hugging Face's forward in double precision, from a folder's own tensors and config.json: one reading path of `--verify`.

The invariant: nothing but arithmetic is shared with Megatron's forward. A wrong row order, transposition, offset, activation or
epsilon in a conversion makes the two differ by far more than rounding. Weights are read tensor by tensor, so that the largest
one is the memory needed.

Shapes: T tokens, W a row of heads next to each other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from holdfast.conversion.arithmetic import (
    ACTIVATIONS,
    Ids,
    attend,
    gelu,
    gelu_tanh,
    layer_norm,
    rms_norm,
    rotate,
    rows_of,
    silu,
    vocabulary_logits,
)
from holdfast.conversion.files.raw_tensors import Array, RawTensor


def huggingface_forward(
    config: Mapping[str, Any], tensors: Mapping[str, RawTensor], ids: Ids, head: str | None = None
) -> dict[str, Array]:
    """`logits` [T, V], for BERT also `hidden` and `sentence`, as transformers has them. `head`: another GELU for its head."""
    if "bert" in str(config["model_type"]):
        return _bert(config, _Weights(tensors), ids, head)
    return {"gpt2": _gpt2, "llama": _llama}[str(config["model_type"])](config, _Weights(tensors), ids)


class _Weights:
    def __init__(self, tensors: Mapping[str, RawTensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].whole()

    def linear(self, name: str, x: Array) -> Array:
        bias = self.tensors.get(f"{name}.bias")
        y = x @ self[f"{name}.weight"].T
        return y if bias is None else y + bias.whole()

    def conv1d(self, name: str, x: Array) -> Array:
        return x @ self[f"{name}.weight"] + self[f"{name}.bias"]

    def norm(self, name: str, x: Array, epsilon: float) -> Array:
        return layer_norm(x, self[f"{name}.weight"], self[f"{name}.bias"], epsilon)


def _activation(name: str) -> Callable[[Array], Array]:
    return {"gelu": gelu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh, "gelu_fast": gelu_tanh}[name]


def _heads(x_TW: Array, count: int) -> Array:
    return x_TW.reshape(len(x_TW), count, -1).transpose(1, 0, 2)


def _gpt2(config: Mapping[str, Any], w: _Weights, ids: Ids) -> dict[str, Array]:
    epsilon, count = config.get("layer_norm_epsilon", 1e-5), config["n_head"]
    act = _activation(config.get("activation_function", "gelu_new"))
    table = w.tensors["transformer.wte.weight"]
    x = rows_of(table, ids) + w.tensors["transformer.wpe.weight"].rows(0, len(ids))
    for index in range(config["n_layer"]):
        p = f"transformer.h.{index}."
        q, k, v = np.split(w.conv1d(f"{p}attn.c_attn", w.norm(f"{p}ln_1", x, epsilon)), 3, axis=-1)
        x = x + w.conv1d(f"{p}attn.c_proj", attend(_heads(q, count), _heads(k, count), _heads(v, count), True))
        x = x + w.conv1d(f"{p}mlp.c_proj", act(w.conv1d(f"{p}mlp.c_fc", w.norm(f"{p}ln_2", x, epsilon))))
    x = w.norm("transformer.ln_f", x, epsilon)
    head = table if config.get("tie_word_embeddings", True) else w.tensors["lm_head.weight"]
    return {"logits": vocabulary_logits(x, [head], config["vocab_size"])}


def _llama(config: Mapping[str, Any], w: _Weights, ids: Ids) -> dict[str, Array]:
    epsilon = config.get("rms_norm_eps", 1e-6)
    base = (config.get("rope_parameters") or config).get("rope_theta") or config.get("rope_theta", 10000.0)
    count = config["num_attention_heads"]
    shared = config.get("num_key_value_heads") or count
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
    head = table if config.get("tie_word_embeddings", False) else w.tensors["lm_head.weight"]
    return {"logits": vocabulary_logits(x, [head], config["vocab_size"])}


def _bert(config: Mapping[str, Any], w: _Weights, ids: Ids, head: str | None) -> dict[str, Array]:
    epsilon, count = config.get("layer_norm_eps", 1e-12), config["num_attention_heads"]
    before = config["model_type"] == "megatron-bert"
    act = _activation(config.get("hidden_act", "gelu"))
    table = w.tensors["bert.embeddings.word_embeddings.weight"]
    x = rows_of(table, ids) + w.tensors["bert.embeddings.position_embeddings.weight"].rows(0, len(ids))
    x = x + w.tensors["bert.embeddings.token_type_embeddings.weight"].rows(0, 1)
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
    hidden = (ACTIVATIONS[head] if head else act)(w.linear("cls.predictions.transform.dense", x))
    hidden = w.norm("cls.predictions.transform.LayerNorm", hidden, epsilon)
    bias = "cls.predictions.bias" if "cls.predictions.bias" in w.tensors else "cls.predictions.decoder.bias"
    found = {"hidden": x, "logits": vocabulary_logits(hidden, [table], config["vocab_size"]) + w[bias]}
    if "cls.seq_relationship.weight" in w.tensors:
        found["sentence"] = w.linear("cls.seq_relationship", np.tanh(w.linear("bert.pooler.dense", x[:1])))
    return found
