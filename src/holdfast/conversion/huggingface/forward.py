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
    Rope,
    attend,
    gelu,
    gelu_tanh,
    layer_norm,
    rms_norm,
    rotate,
    rows_of,
    silu,
    softcap,
    vocabulary_logits,
)
from holdfast.conversion.files.raw_tensors import Array, RawTensor


def huggingface_forward(
    config: Mapping[str, Any], tensors: Mapping[str, RawTensor], ids: Ids, head: str | None = None
) -> dict[str, Array]:
    """`logits` [T, V], for BERT also `hidden` and `sentence`, as transformers has them. `head`: another GELU for its head."""
    if "bert" in str(config["model_type"]):
        return _bert(config, _Weights(tensors), ids, head)
    run = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(str(config["model_type"]), _llama)
    return run(config, _Weights(tensors), ids)


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


def _rope(config: Mapping[str, Any]) -> Rope:
    """The rotary settings of a configuration of any age."""
    stated = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = stated.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    neox = config["model_type"] == "gpt_neox"
    share = stated.get("partial_rotary_factor") or config.get("rotary_pct") or (0.25 if neox else 1.0)
    longest = config["max_position_embeddings"]
    original = stated.get("original_max_position_embeddings") or longest
    scales = [stated.get("mscale") or 0.0, stated.get("mscale_all_dim") or 0.0]
    factor, attention = stated.get("factor") or longest / original, stated.get("attention_factor")
    if attention is None and all(scales):
        above, below = (0.1 * scale * np.log(factor) + 1 for scale in scales)
        attention = above / below
    return Rope(
        base=theta,
        share=share,
        kind=stated.get("rope_type") or stated.get("type") or "default",
        factor=factor,
        original=original,
        low=stated.get("low_freq_factor") or 1.0,
        high=stated.get("high_freq_factor") or 4.0,
        fast=stated.get("beta_fast") or 32.0,
        slow=stated.get("beta_slow") or 1.0,
        attention=attention,
    )


def _gpt_neox(config: Mapping[str, Any], w: _Weights, ids: Ids) -> dict[str, Array]:
    epsilon, count, rope = config.get("layer_norm_eps", 1e-5), config["num_attention_heads"], _rope(config)
    act = _activation(config.get("hidden_act", "gelu"))
    table = w.tensors["gpt_neox.embed_in.weight"]
    x = rows_of(table, ids)
    for index in range(config["num_hidden_layers"]):
        p = f"gpt_neox.layers.{index}."
        joined = w.linear(f"{p}attention.query_key_value", w.norm(f"{p}input_layernorm", x, epsilon))
        q, k, v = np.split(_heads(joined, count), 3, axis=-1)
        attended = w.linear(f"{p}attention.dense", attend(rotate(q, rope), rotate(k, rope), v, True))
        entered = x if config.get("use_parallel_residual", True) else x + attended
        y = w.norm(f"{p}post_attention_layernorm", entered, epsilon)
        x = x + attended + w.linear(f"{p}mlp.dense_4h_to_h", act(w.linear(f"{p}mlp.dense_h_to_4h", y)))
    x = w.norm("gpt_neox.final_layer_norm", x, epsilon)
    head = table if config.get("tie_word_embeddings", False) else w.tensors["embed_out.weight"]
    return {"logits": vocabulary_logits(x, [head], config["vocab_size"])}


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """How many tokens before it a token attends to in each layer; None: all."""
    kind, layers, size = config["model_type"], config["num_hidden_layers"], config.get("sliding_window", 4096)
    first = config.get("max_window_layers", 28) if config.get("use_sliding_window") is True else layers
    usual = {"mistral": [True] * layers, "gemma2": [number % 2 == 0 for number in range(layers)]}
    sliding = usual.get(kind, [number >= first for number in range(layers)])
    if config.get("layer_types"):
        sliding = [name == "sliding_attention" for name in config["layer_types"]]
    return [size - 1 if each and size is not None else None for each in sliding]


def _llama(config: Mapping[str, Any], w: _Weights, ids: Ids) -> dict[str, Array]:
    """Llama, Mistral, Qwen 2 and 3, Gemma 2: biases and norms of queries and keys are there if the folder has them."""
    epsilon, rope, gemma = config.get("rms_norm_eps", 1e-6), _rope(config), config["model_type"] == "gemma2"
    count, windows = config["num_attention_heads"], _windows(config)
    shared = {"llama": count, "mistral": 8, "gemma2": 4}.get(config["model_type"], 32)
    shared = config.get("num_key_value_heads") or shared
    divisor = config.get("query_pre_attn_scalar", 256) if gemma else None
    bounds = [
        config.get(f"{name}_logit_softcapping", usual) if gemma else None
        for name, usual in (("attn", 50.0), ("final", 30.0))
    ]
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    table = w.tensors["model.embed_tokens.weight"]
    x = rows_of(table, ids) * (np.sqrt(config["hidden_size"]) if gemma else 1.0)

    def norm(name: str, x: Array) -> Array:
        return rms_norm(x, w[f"{name}.weight"] + (1.0 if gemma else 0.0), epsilon)

    for index in range(config["num_hidden_layers"]):
        p = f"model.layers.{index}."
        y = norm(f"{p}input_layernorm", x)
        q, k = _heads(w.linear(f"{p}self_attn.q_proj", y), count), _heads(w.linear(f"{p}self_attn.k_proj", y), shared)
        if f"{p}self_attn.q_norm.weight" in w.tensors:
            q, k = norm(f"{p}self_attn.q_norm", q), norm(f"{p}self_attn.k_norm", k)
        q, k, v = rotate(q, rope), rotate(k, rope), _heads(w.linear(f"{p}self_attn.v_proj", y), shared)
        k, v = np.repeat(k, count // shared, axis=0), np.repeat(v, count // shared, axis=0)
        y = w.linear(f"{p}self_attn.o_proj", attend(q, k, v, True, windows[index], divisor, bounds[0]))
        x = x + (norm(f"{p}post_attention_layernorm", y) if gemma else y)
        y = norm(f"{p}{before_mlp}", x)
        gate = (gelu_tanh if gemma else silu)(w.linear(f"{p}mlp.gate_proj", y))
        y = w.linear(f"{p}mlp.down_proj", gate * w.linear(f"{p}mlp.up_proj", y))
        x = x + (norm(f"{p}post_feedforward_layernorm", y) if gemma else y)
    x = norm("model.norm", x)
    head = table if config.get("tie_word_embeddings", gemma) else w.tensors["lm_head.weight"]
    return {"logits": softcap(vocabulary_logits(x, [head], config["vocab_size"]), bounds[1])}


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
