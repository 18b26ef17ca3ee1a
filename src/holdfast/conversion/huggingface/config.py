"""config.json ↔ Architecture, by the table of families.

The invariant: `describe_for_huggingface` gives a configuration under which transformers computes the same function, or refuses
with the reason: read back, it gives the same function. The one exception has a note: BERT with a tanh trunk and an exact head
(see `BERT_HEAD_NOTE`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from holdfast.conversion.huggingface.families import FAMILIES, ModelClass
from holdfast.conversion.huggingface.rope import rope_parameters, rotary_fields
from holdfast.conversion.huggingface.windows import window_fields, window_keys
from holdfast.conversion.model import SPECIAL_IDS, Architecture, function_of, read_real, read_size
from holdfast.conversion.tensors import DTYPE_NAMES
from holdfast.system.errors import HoldfastError

BERT_HEAD_NOTE = (
    "BERT's trunk uses the tanh GELU and its language model head the exact one, which config.json cannot express: hidden_act is "
    "gelu_new, so the head's activations differ by at most 4.8e-4 (logits by about 4e-5); pooler and sentence head are exact"
)
DROPOUT_NOTE = "hidden_dropout {} left out: a {} configuration has no such key, and inference has no dropout"
_DERIVED = ("ffn_hidden_size", "num_query_groups", "kv_channels", "query_pre_attn_scalar")
"""Sizes that transformers derives from the others, or has a value for, where they are absent."""


def describe_for_huggingface(
    arch: Architecture, dtype: str, special_ids: Mapping[str, Any], preferred: str | None = None
) -> tuple[str, dict[str, Any], list[str]]:
    """The model type, config.json, and notes for the user. `special_ids` are bos_token_id and eos_token_id.

    `preferred`: the model type of the source, which is kept if several compute the same function.
    """
    model_type = _model_type(arch, preferred)
    family, config = FAMILIES[model_type], _config(model_type, arch)
    config["torch_dtype"] = DTYPE_NAMES[dtype]
    if arch.model_type == "bert":
        config["architectures"] = [
            f"{family.model_class}For{'MaskedLM' if arch.bert_no_binary_head else 'PreTraining'}"
        ]
        config |= {"type_vocab_size": arch.token_types, "pad_token_id": 0}
        return model_type, config, [BERT_HEAD_NOTE] if arch.activation != arch.head_activation else []
    config |= {"architectures": [family.model_class], "use_cache": True}
    config |= {key: special_ids.get(key) for key in SPECIAL_IDS}
    if model_type == "gpt2":
        config["embd_pdrop"] = arch.hidden_dropout
    left_out = arch.hidden_dropout and "hidden_dropout" not in family.reals
    return model_type, config, [DROPOUT_NOTE.format(arch.hidden_dropout, model_type)] if left_out else []


def _config(model_type: str, arch: Architecture) -> dict[str, Any]:
    """What a config.json of this class states about the function."""
    family = FAMILIES[model_type]
    config: dict[str, Any] = {
        "model_type": model_type,
        **{key: getattr(arch, field) or arch.kv_channels for field, key in family.sizes.items()},
        **{key: getattr(arch, field) for field, (key, _) in (*family.reals.items(), *family.flags.items())},
        **{key: getattr(arch, field) or None for field, (key, _) in family.bounds.items()},
        **family.only,
        **dict.fromkeys(family.bias_keys, arch.bias),
        "vocab_size": arch.vocabulary(),
        "tie_word_embeddings": arch.tied,
    }
    if family.activation:
        config[family.activation] = "gelu_new" if arch.openai_gelu else "gelu"
    return config | window_keys(arch, family) | rope_parameters(arch, family)


def _model_type(arch: Architecture, preferred: str | None) -> str:
    """The class of transformers that computes the same function: the first whose config.json gives it back."""
    ours, nearest = function_of(replace(arch, bert_no_binary_head=False)), ""
    fewest: list[str] | None = None
    for model_type in sorted(FAMILIES, key=lambda name: name != preferred):
        if FAMILIES[model_type].always.get("model_type", "gpt") != arch.model_type:
            continue
        theirs = function_of(architecture_from_config(_config(model_type, arch), model_type)[1])
        keys = sorted(ours.keys() | theirs.keys(), key=list({**ours, **theirs}).index)
        differing = [
            f"{key} = {theirs.get(key)}, not {ours.get(key)}" for key in keys if theirs.get(key) != ours.get(key)
        ]
        if not differing:
            return model_type
        if fewest is None or len(differing) < len(fewest):
            fewest, nearest = differing, model_type
    raise HoldfastError(
        f"Hugging Face has no model class for this architecture; the target cannot be hf. The nearest, {nearest}, has "
        f"{'; '.join(fewest or [])}"
    )


def architecture_from_config(config: Mapping[str, Any], origin: str) -> tuple[str, Architecture]:
    """The architecture that a config.json describes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise HoldfastError(
            f"{origin}: model_type {model_type!r} is not one that Holdfast converts ({', '.join(FAMILIES)})"
        )
    family = FAMILIES[model_type]
    _check_options(config, family, origin)
    sizes = {
        field: read_size(config, key, f"{origin}: ")
        for field, key in family.sizes.items()
        if field not in _DERIVED or config.get(key)
    }
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    rows = read_size(config, "vocab_size", f"{origin}: ")
    tied = config.get("tie_word_embeddings", family.tied) is True
    fields: dict[str, Any] = {
        **{"num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden},
        **family.defaults,
        **sizes,
        **{field: read_real(config, key, value, f"{origin}: ") for field, (key, value) in family.reals.items()},
        **{
            field: 0.0 if config.get(key, value) is None else read_real(config, key, value, f"{origin}: ")
            for field, (key, value) in family.bounds.items()
        },
        **{field: config.get(key, value) is True for field, (key, value) in family.flags.items()},
        "untie_embeddings_and_output_weights": not tied,
        "disable_bias_linear": bool(family.bias_keys) and config.get(family.bias_keys[0], False) is not True,
        **rotary_fields(config, family, origin),
        **window_fields(config, family, sizes["num_layers"], origin),
        **family.always,
    }
    if family.activation:
        activation = _gelu(config.get(family.activation, "gelu_new" if model_type == "gpt2" else "gelu"), origin)
        fields |= {"openai_gelu": activation == "gelu_tanh", "head_activation": activation}
    if model_type.endswith("bert") and "type_vocab_size" in config:
        fields["token_types"] = read_size(config, "type_vocab_size", f"{origin}: ")
    return model_type, Architecture(padded_vocab_size=rows, vocab_size=rows, **fields)


def _check_options(config: Mapping[str, Any], family: ModelClass, origin: str) -> None:
    """Refuses, by name, options under which the class computes something that no other format can express."""
    for key, value in {**family.only, "quantization_config": None}.items():
        if (config.get(key, value) or None) != (value or None):
            raise HoldfastError(f"{origin}: {key} = {config[key]} cannot be converted exactly")
    biases = [config.get(key, False) for key in family.bias_keys]
    if any(bias != biases[0] for bias in biases):
        raise HoldfastError(
            f"{origin}: {' without '.join(family.bias_keys)}, or the reverse, cannot be converted exactly"
        )


def _gelu(name: Any, origin: str) -> Literal["gelu", "gelu_tanh"]:
    if name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"):
        return "gelu_tanh"
    if name == "gelu":
        return "gelu"
    raise HoldfastError(f"{origin}: the activation {name!r} cannot be converted exactly")
