"""What Megatron's versions call each parameter, and how tensor parallelism shards it.

The invariant: every name either maps to one canonical name (layer numbers still local to the stage), is a known buffer without
weights, or is refused.
"""

import re
from typing import Literal

from holdfast.system.errors import HoldfastError

ShardKind = Literal["rows", "columns", "whole", "qkv", "gated"]

_LEGACY_LAYER = {
    "input_norm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.dense": "self_attention.linear_proj",
    "self_attention.proj": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
# Transformer Engine fuses a norm into the linear layer behind it.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.layernorm_qkv.layer_norm_": "input_layernorm.",
    "self_attention.layernorm_qkv.": "self_attention.linear_qkv.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "layernorm_mlp.layer_norm_": "pre_mlp_layernorm.",
    "layernorm_mlp.fc1_": "mlp.linear_fc1.",
    "layernorm_mlp.fc2_": "mlp.linear_fc2.",
}
_TOP = {
    "word_embeddings_for_head.weight": "output_layer.weight",
    "lm_head.bias": "output_layer.bias",
    "lm_head.layernorm.weight": "lm_head.layer_norm.weight",
    "lm_head.layernorm.bias": "lm_head.layer_norm.bias",
}
_BUFFERS = re.compile(r"(_extra_state|inv_freq|attention_mask|(attn|attention)\.(masked_)?bias)$|_extra_state/")
_LAYER = re.compile(r"^(?:transformer|encoder|decoder)\.layers\.(\d+\.)?(.+)$")
_KNOWN = re.compile(
    r"(embedding\.(word|position|tokentype)_embeddings\.weight"
    r"|(decoder|encoder)\.final_layernorm\.(weight|bias)"
    r"|(decoder|encoder)\.layers\.(\d{1,6}\.)?((input_layernorm|pre_mlp_layernorm|self_attention\.(linear_(qkv|proj)|[qk]_layernorm)"
    r"|mlp\.linear_fc[12])\.(weight|bias))"
    r"|output_layer\.(weight|bias)|(pooler\.dense|lm_head\.dense|lm_head\.layer_norm|binary_head)\.(weight|bias))"
)
_UNSUPPORTED = {
    "experts": "mixture of experts",
    "router": "mixture of experts",
    "inter_attention": "cross-attention (T5)",
    "cross_attention": "cross-attention (T5)",
    "mtp": "multi-token prediction",
}


def canonical_name(name: str, stack: str) -> str | None:
    """Holdfast's name of a Megatron parameter; None for a buffer that carries no weights."""
    if _BUFFERS.search(name):
        return None
    plain = re.sub(r"^(module\.)*(model\.)?(language_model\.)?", "", name)
    plain = _TOP.get(plain, plain)
    if re.match(r"(word|position|tokentype)_embeddings\.", plain):
        plain = f"embedding.{plain}"
    plain = re.sub(r"^(?:transformer\.|encoder\.|decoder\.)final_(?:layer)?norm\.", f"{stack}.final_layernorm.", plain)
    layer = _LAYER.match(plain)
    if layer:
        plain = f"{stack}.layers.{layer[1] or ''}{_layer_name(layer[2])}"
    if not _KNOWN.fullmatch(plain):
        reason = next((text for part, text in _UNSUPPORTED.items() if part in plain), None)
        raise HoldfastError(
            f"{name} is a parameter that Holdfast cannot convert exactly{f': {reason}' if reason else ''}"
        )
    return plain


def _layer_name(rest: str) -> str:
    for old, new in _FUSED.items():
        if rest.startswith(old):
            return new + rest.removeprefix(old)
    module, _, kind = rest.rpartition(".")
    return f"{_LEGACY_LAYER.get(module, module)}.{kind}"


def shard_kind(name: str, swiglu: bool) -> ShardKind:
    """How tensor parallelism cuts a canonical parameter."""
    if name.startswith(("embedding.word_embeddings", "output_layer.")):
        return "rows"
    if ".linear_qkv." in name:
        return "qkv"
    if ".linear_fc1" in name:
        return "gated" if swiglu else "rows"
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):
        return "columns"
    return "whole"


def legacy_name(name: str) -> str:
    """The dotted name that Megatron-LM's own (pre-core) models use, below `model`."""
    top = {new: old for old, new in _TOP.items() if not old.startswith("word_embeddings_for_head")}
    if name in top or name.startswith(("lm_head.", "binary_head.")):
        return top.get(name, name)
    layer = re.match(r"^(?:decoder|encoder)\.(.+)$", name)
    if layer is None:
        return f"language_model.{name}"
    rest = layer[1]
    for old, new in (
        ("self_attention.linear_qkv", "self_attention.query_key_value"),
        ("self_attention.linear_proj", "self_attention.dense"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
        ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
        ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    ):
        rest = rest.replace(old, new)
    return f"language_model.encoder.{rest}"
