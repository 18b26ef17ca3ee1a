"""config.json ↔ Architecture: which functions Hugging Face can describe, and which it cannot.

The invariant: `describe_for_huggingface` gives a configuration under which transformers computes the same function, or refuses
with the reason. The one exception has a note: BERT with a tanh trunk and an exact head (see `BERT_HEAD_NOTE`).
"""

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from holdfast.conversion.model import SPECIAL_IDS, Architecture, read_real, read_size
from holdfast.conversion.tensors import DTYPE_NAMES
from holdfast.system.errors import HoldfastError

BERT_HEAD_NOTE = (
    "BERT's trunk uses the tanh GELU and its language model head the exact one, which config.json cannot express: hidden_act is "
    "gelu_new, so the head's activations differ by at most 4.8e-4 (logits by about 4e-5); pooler and sentence head are exact"
)
DROPOUT_NOTE = "hidden_dropout {} left out: a Llama configuration has no such key, and inference has no dropout"
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}

# model_type → field of Architecture → key of config.json; for numbers that may be absent also what transformers then takes.
_BERT_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
_SIZES = {
    "gpt2": {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    "llama": {**_BERT_SIZES, "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"},
    "bert": _BERT_SIZES,
    "megatron-bert": _BERT_SIZES,
}
_DERIVED = ("n_inner", "num_key_value_heads", "head_dim")
"""Sizes that transformers derives from the others where they are absent."""
_BERT_REALS = {
    "norm_epsilon": ("layer_norm_eps", 1e-12),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
}
_REALS = {
    "gpt2": {
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
    },
    "llama": {"norm_epsilon": ("rms_norm_eps", 1e-6), "attention_dropout": ("attention_dropout", 0.0)},
    "bert": _BERT_REALS,
    "megatron-bert": _BERT_REALS,
}


def describe_for_huggingface(
    arch: Architecture, dtype: str, special_ids: Mapping[str, Any]
) -> tuple[str, dict[str, Any], list[str]]:
    """The model type, config.json, and notes for the user. `special_ids` are bos_token_id and eos_token_id."""
    model_type, notes = _model_type(arch), []
    sizes = {key: getattr(arch, field) for field, key in _SIZES[model_type].items()}
    reals = {key: getattr(arch, field) for field, (key, _) in _REALS[model_type].items()}
    config: dict[str, Any] = {
        "model_type": model_type,
        **sizes,
        **reals,
        "vocab_size": arch.vocabulary(),
        "tie_word_embeddings": arch.tied,
        "torch_dtype": DTYPE_NAMES[dtype],
    }
    if arch.model_type == "bert":
        kind = "Bert" if model_type == "bert" else "MegatronBert"
        config["architectures"] = [f"{kind}For{'MaskedLM' if arch.bert_no_binary_head else 'PreTraining'}"]
        config |= {"hidden_act": _ACTIVATIONS[arch.activation], "type_vocab_size": arch.token_types, "pad_token_id": 0}
        return model_type, config, [BERT_HEAD_NOTE] if arch.activation != arch.head_activation else []
    config |= {key: special_ids.get(key) for key in SPECIAL_IDS} | {"use_cache": True}
    if model_type == "gpt2":
        config |= {"architectures": ["GPT2LMHeadModel"], "embd_pdrop": arch.hidden_dropout}
        config["activation_function"] = _ACTIVATIONS[arch.activation]
    else:
        config |= {"architectures": ["LlamaForCausalLM"], "attention_bias": arch.bias, "mlp_bias": arch.bias}
        config |= {"hidden_act": "silu", "rope_theta": arch.rotary_base}
        config["rope_parameters"] = {"rope_theta": arch.rotary_base, "rope_type": "default"}
        notes += [DROPOUT_NOTE.format(arch.hidden_dropout)] if arch.hidden_dropout else []
    return model_type, config, notes


def _model_type(arch: Architecture) -> str:
    """The class of transformers that computes the same function."""
    rotary, grouped = arch.position_embedding_type == "rope", arch.num_query_groups != arch.num_attention_heads
    plain = arch.normalization == "LayerNorm" and not rotary and not arch.swiglu
    if arch.model_type == "bert":
        if not plain:
            _refuse("BERT with anything but learned positions, LayerNorm and GELU")
        if not (arch.bias and arch.qkv_bias and arch.tied) or grouped:
            _refuse("BERT without biases, with grouped queries or with a separate output matrix")
        if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
            _refuse("kv_channels × heads different from hidden_size in BERT")
        return "bert" if arch.post_norm else "megatron-bert"
    if plain:
        if grouped:
            _refuse("grouped queries in GPT-2")
        if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
            _refuse("kv_channels × heads different from hidden_size in GPT-2")
        if not arch.bias or not arch.qkv_bias:
            _refuse("GPT-2 without biases")
        return "gpt2"
    if arch.normalization == "RMSNorm" and rotary and arch.swiglu:
        if arch.qkv_bias != arch.bias:
            _refuse("a bias on queries, keys and values only, in Llama")
        return "llama"
    _refuse(
        f"{arch.normalization} with {'rotary' if rotary else 'learned'} positions and {arch.activation}: "
        "neither GPT-2 (LayerNorm, learned, GELU) nor Llama (RMSNorm, rotary, SwiGLU)"
    )


def architecture_from_config(config: Mapping[str, Any], origin: str) -> tuple[str, Architecture]:
    """The architecture that a config.json describes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _SIZES:
        raise HoldfastError(
            f"{origin}: model_type {model_type!r} is not one that Holdfast converts (gpt2, llama, bert, megatron-bert)"
        )
    special = {"gpt2": _gpt2_fields, "llama": _llama_fields}.get(model_type, _bert_fields)(config, origin)
    sizes = {
        field: read_size(config, key, f"{origin}: ")
        for field, key in _SIZES[model_type].items()
        if key not in _DERIVED or config.get(key)
    }
    hidden, heads, rows = (
        sizes["hidden_size"],
        sizes["num_attention_heads"],
        read_size(config, "vocab_size", f"{origin}: "),
    )
    derived = {"num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden}
    reals = {
        field: read_real(config, key, default, f"{origin}: ") for field, (key, default) in _REALS[model_type].items()
    }
    tied = config.get("tie_word_embeddings", model_type != "llama") is True or "bert" in model_type
    fields: dict[str, Any] = {**derived, **sizes, **reals, **special, "untie_embeddings_and_output_weights": not tied}
    return model_type, Architecture(padded_vocab_size=rows, vocab_size=rows, **fields)


def _gpt2_fields(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    for name, harmless in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False),
    ):  # fmt: skip
        if config.get(name, harmless) != harmless:
            raise HoldfastError(f"{origin}: {name} = {config[name]} cannot be converted exactly")
    return {"openai_gelu": _gelu(config.get("activation_function", "gelu_new"), origin) == "gelu_tanh"}


def _llama_fields(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise HoldfastError(f"{origin}: rope_parameters is not an object")
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise HoldfastError(f"{origin}: rotary scaling cannot be converted exactly")
    bias = config.get("attention_bias", False)
    if config.get("hidden_act", "silu") != "silu" or bias != config.get("mlp_bias", False):
        raise HoldfastError(
            f"{origin}: hidden_act other than silu, or attention_bias without mlp_bias, cannot be converted exactly"
        )
    theta = read_real(config, "rope_theta", 10000.0, f"{origin}: ")
    return {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_base": read_real(rope, "rope_theta", theta, f"{origin}: "),
        "disable_bias_linear": bias is not True,
        "qkv_bias": bias is True,
    }


def _bert_fields(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    relative = config.get("position_embedding_type", "absolute") != "absolute"
    if relative or config.get("is_decoder") or config.get("add_cross_attention"):
        raise HoldfastError(
            f"{origin}: relative positions, decoders and cross-attention in BERT cannot be converted exactly"
        )
    activation = _gelu(config.get("hidden_act", "gelu"), origin)
    return {
        "model_type": "bert",
        "bert_variant": "original" if config["model_type"] == "bert" else "megatron",
        "openai_gelu": activation == "gelu_tanh",
        "head_activation": activation,
        "token_types": read_size(config, "type_vocab_size", f"{origin}: ") if "type_vocab_size" in config else 2,
    }


def _gelu(name: Any, origin: str) -> Literal["gelu", "gelu_tanh"]:
    if name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"):
        return "gelu_tanh"
    if name == "gelu":
        return "gelu"
    raise HoldfastError(f"{origin}: the activation {name!r} cannot be converted exactly")


def _refuse(what: str) -> NoReturn:
    raise HoldfastError(f"Hugging Face has no model class for {what}; the target cannot be hf")
