"""config.json ↔ Architecture: what Hugging Face can say about a function, and what it cannot.

The invariant: `describe_for_huggingface` gives a configuration under which transformers computes the same function, or refuses
with the reason. The one exception is said aloud: BERT with a tanh trunk and an exact head (see `BERT_HEAD_NOTE`).
"""

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from holdfast.conversion.model import Architecture
from holdfast.system.errors import HoldfastError

BERT_HEAD_NOTE = (
    "BERT's trunk uses the tanh GELU and its language model head the exact one, which config.json cannot say: hidden_act is "
    "gelu_new, so the head's activations differ by at most 4.8e-4 (logits by about 4e-5); pooler and sentence head are exact"
)
DROPOUT_NOTE = "hidden_dropout {} left out: a Llama configuration has no place for it, and inference has no dropout"
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def describe_for_huggingface(
    arch: Architecture, dtype: str, special_ids: Mapping[str, Any]
) -> tuple[str, dict[str, Any], list[str]]:
    """The model type, config.json, and notes for the user. `special_ids` are bos_token_id and eos_token_id."""
    if arch.family == "bert":
        return _bert(arch, dtype)
    if arch.normalization == "LayerNorm" and arch.positions == "learned_absolute" and arch.activation != "swiglu":
        return "gpt2", _gpt2(arch, dtype, special_ids), []
    if arch.normalization == "RMSNorm" and arch.positions == "rope" and arch.activation == "swiglu":
        notes = [DROPOUT_NOTE.format(arch.hidden_dropout)] if arch.hidden_dropout else []
        return "llama", _llama(arch, dtype, special_ids), notes
    _cannot(
        f"{arch.normalization} with {'rotary' if arch.positions == 'rope' else 'learned'} positions and {arch.activation}: "
        "neither GPT-2 (LayerNorm, learned, GELU) nor Llama (RMSNorm, rotary, SwiGLU)"
    )


def _gpt2(arch: Architecture, dtype: str, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    if arch.num_query_groups != arch.num_attention_heads:
        _cannot("grouped queries in GPT-2")
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        _cannot("kv_channels × heads different from hidden_size in GPT-2")
    if not arch.bias or not arch.qkv_bias:
        _cannot("GPT-2 without biases")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": _ACTIVATIONS[arch.activation],
        "attn_pdrop": arch.attention_dropout,
        "embd_pdrop": arch.hidden_dropout,
        "resid_pdrop": arch.hidden_dropout,
        "layer_norm_epsilon": arch.norm_epsilon,
        "n_embd": arch.hidden_size,
        "n_head": arch.num_attention_heads,
        "n_inner": arch.ffn_hidden_size,
        "n_layer": arch.num_layers,
        "n_positions": arch.max_position_embeddings,
        "vocab_size": arch.vocabulary(),
        "tie_word_embeddings": arch.tied,
        "bos_token_id": special_ids.get("bos_token_id"),
        "eos_token_id": special_ids.get("eos_token_id"),
        "use_cache": True,
        "torch_dtype": _DTYPES[dtype],
    }


def _llama(arch: Architecture, dtype: str, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    if arch.qkv_bias != arch.bias:
        _cannot("a bias on queries, keys and values only, in Llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": arch.bias,
        "mlp_bias": arch.bias,
        "attention_dropout": arch.attention_dropout,
        "head_dim": arch.kv_channels,
        "hidden_act": "silu",
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_hidden_size,
        "max_position_embeddings": arch.max_position_embeddings,
        "num_attention_heads": arch.num_attention_heads,
        "num_hidden_layers": arch.num_layers,
        "num_key_value_heads": arch.num_query_groups,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_theta": arch.rotary_base,
        "rope_parameters": {"rope_theta": arch.rotary_base, "rope_type": "default"},
        "vocab_size": arch.vocabulary(),
        "tie_word_embeddings": arch.tied,
        "bos_token_id": special_ids.get("bos_token_id"),
        "eos_token_id": special_ids.get("eos_token_id"),
        "use_cache": True,
        "torch_dtype": _DTYPES[dtype],
    }


def _bert(arch: Architecture, dtype: str) -> tuple[str, dict[str, Any], list[str]]:
    model_type = "bert" if arch.post_norm else "megatron-bert"
    if arch.positions != "learned_absolute" or arch.normalization != "LayerNorm" or arch.activation == "swiglu":
        _cannot("BERT with anything but learned positions, LayerNorm and GELU")
    if not (arch.bias and arch.qkv_bias and arch.tied) or arch.num_query_groups != arch.num_attention_heads:
        _cannot("BERT without biases, with grouped queries or with a separate output matrix")
    if arch.kv_channels * arch.num_attention_heads != arch.hidden_size:
        _cannot("kv_channels × heads different from hidden_size in BERT")
    kind = {"bert": "Bert", "megatron-bert": "MegatronBert"}[model_type]
    config = {
        "architectures": [f"{kind}For{'PreTraining' if arch.binary_head else 'MaskedLM'}"],
        "model_type": model_type,
        "attention_probs_dropout_prob": arch.attention_dropout,
        "hidden_act": _ACTIVATIONS[arch.activation],
        "hidden_dropout_prob": arch.hidden_dropout,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_hidden_size,
        "layer_norm_eps": arch.norm_epsilon,
        "max_position_embeddings": arch.max_position_embeddings,
        "num_attention_heads": arch.num_attention_heads,
        "num_hidden_layers": arch.num_layers,
        "type_vocab_size": arch.token_types,
        "vocab_size": arch.vocabulary(),
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "torch_dtype": _DTYPES[dtype],
    }
    return model_type, config, [BERT_HEAD_NOTE] if arch.activation != arch.head_activation else []


def architecture_from_config(config: Mapping[str, Any], origin: str) -> tuple[str, Architecture]:
    """The architecture that a config.json describes."""
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return "gpt2", _from_gpt2(config, origin)
    if model_type == "llama":
        return "llama", _from_llama(config, origin)
    if model_type in ("bert", "megatron-bert"):
        return model_type, _from_bert(config, origin, model_type == "bert")
    raise HoldfastError(
        f"{origin}: model_type {model_type!r} is not one that Holdfast converts (gpt2, llama, bert, megatron-bert)"
    )


def _from_gpt2(config: Mapping[str, Any], origin: str) -> Architecture:
    for name, harmless in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False),
    ):  # fmt: skip
        if config.get(name, harmless) != harmless:
            raise HoldfastError(f"{origin}: {name} = {config[name]} cannot be converted exactly")
    hidden, heads = _number(config, "n_embd", origin), _number(config, "n_head", origin)
    vocabulary = _number(config, "vocab_size", origin)
    return Architecture(
        family="gpt",
        num_layers=_number(config, "n_layer", origin),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=_number(config, "n_inner", origin) if config.get("n_inner") else 4 * hidden,
        max_position_embeddings=_number(config, "n_positions", origin),
        padded_vocab_size=vocabulary,
        true_vocab_size=vocabulary,
        norm_epsilon=_real(config, "layer_norm_epsilon", 1e-5, origin),
        activation=_activation(config.get("activation_function", "gelu_new"), origin),
        tied=config.get("tie_word_embeddings", True) is True,
        hidden_dropout=_real(config, "resid_pdrop", 0.1, origin),
        attention_dropout=_real(config, "attn_pdrop", 0.1, origin),
    )


def _from_llama(config: Mapping[str, Any], origin: str) -> Architecture:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise HoldfastError(f"{origin}: rope_parameters is not an object")
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise HoldfastError(f"{origin}: rotary scaling cannot be converted exactly")
    if config.get("hidden_act", "silu") != "silu" or config.get("attention_bias", False) != config.get(
        "mlp_bias", False
    ):
        raise HoldfastError(
            f"{origin}: hidden_act other than silu, or attention_bias without mlp_bias, cannot be converted exactly"
        )
    hidden, heads = _number(config, "hidden_size", origin), _number(config, "num_attention_heads", origin)
    vocabulary = _number(config, "vocab_size", origin)
    bias = config.get("attention_bias", False) is True
    return Architecture(
        family="gpt",
        num_layers=_number(config, "num_hidden_layers", origin),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=_number(config, "num_key_value_heads", origin) if config.get("num_key_value_heads") else heads,
        kv_channels=_number(config, "head_dim", origin) if config.get("head_dim") else hidden // heads,
        ffn_hidden_size=_number(config, "intermediate_size", origin),
        max_position_embeddings=_number(config, "max_position_embeddings", origin),
        padded_vocab_size=vocabulary,
        true_vocab_size=vocabulary,
        norm_epsilon=_real(config, "rms_norm_eps", 1e-6, origin),
        activation="swiglu",
        normalization="RMSNorm",
        positions="rope",
        rotary_base=_real(rope, "rope_theta", _real(config, "rope_theta", 10000.0, origin), origin),
        tied=config.get("tie_word_embeddings", False) is True,
        bias=bias,
        qkv_bias=bias,
        attention_dropout=_real(config, "attention_dropout", 0.0, origin),
    )


def _from_bert(config: Mapping[str, Any], origin: str, post_norm: bool) -> Architecture:
    if (
        config.get("position_embedding_type", "absolute") != "absolute"
        or config.get("is_decoder")
        or config.get("add_cross_attention")
    ):
        raise HoldfastError(
            f"{origin}: relative positions, decoders and cross-attention in BERT cannot be converted exactly"
        )
    hidden, heads = _number(config, "hidden_size", origin), _number(config, "num_attention_heads", origin)
    vocabulary = _number(config, "vocab_size", origin)
    activation = _activation(config.get("hidden_act", "gelu"), origin)
    return Architecture(
        family="bert",
        num_layers=_number(config, "num_hidden_layers", origin),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=_number(config, "intermediate_size", origin),
        max_position_embeddings=_number(config, "max_position_embeddings", origin),
        padded_vocab_size=vocabulary,
        true_vocab_size=vocabulary,
        norm_epsilon=_real(config, "layer_norm_eps", 1e-12, origin),
        activation=activation,
        head_activation=activation,
        post_norm=post_norm,
        token_types=_number(config, "type_vocab_size", origin) if "type_vocab_size" in config else 2,
        hidden_dropout=_real(config, "hidden_dropout_prob", 0.1, origin),
        attention_dropout=_real(config, "attention_probs_dropout_prob", 0.1, origin),
    )


def _activation(name: Any, origin: str) -> Literal["gelu", "gelu_tanh"]:
    if name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"):
        return "gelu_tanh"
    if name == "gelu":
        return "gelu"
    raise HoldfastError(f"{origin}: the activation {name!r} cannot be converted exactly")


def _real(config: Mapping[str, Any], name: str, default: float, origin: str) -> float:
    value = config.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise HoldfastError(f"{origin}: {name} is {value!r}, where a number is expected")
    return float(value)


def _number(config: Mapping[str, Any], name: str, origin: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value < 1 << 40:
        raise HoldfastError(f"{origin}: {name} is {value!r}, where a positive number of sane size is expected")
    return value


def _cannot(what: str) -> NoReturn:
    raise HoldfastError(f"Hugging Face has no model class for {what}; the target cannot be hf")
