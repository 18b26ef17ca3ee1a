"""Rotary positions in Megatron's args ↔ the rotary fields of Architecture.

Megatron has three scalings: Llama 3's with fixed bounds (use_rope_scaling), linear (rotary_seq_len_interpolation_factor), and
YaRN as a position_embedding_type of its own.
"""

from collections.abc import Mapping
from typing import Any

from holdfast.conversion.megatron.settings import refuse_setting
from holdfast.conversion.model import Architecture, read_real, read_size, yarn_attention_factor

# Field of Architecture → arg, of YaRN.
_YARN = {
    "rope_scaling_factor": "yarn_rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
}


def rotary_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """The position encoding that the args describe."""
    kind = str(args.get("position_embedding_type") or "learned_absolute").rsplit(".", 1)[-1]
    if kind not in ("learned_absolute", "rope", "yarn"):
        refuse_setting("position_embedding_type", args["position_embedding_type"])
    if kind == "learned_absolute" and args.get("use_rotary_position_embeddings") is not True:
        return {"position_embedding_type": "learned_absolute"}
    percent = _real(args, "rotary_percent", 1.0)
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": _real(args, "rotary_base", 10000.0),
        "rotary_percent": percent,
    }
    linear = _real(args, "rotary_seq_len_interpolation_factor", 0.0)
    scaled = args.get("use_rope_scaling") is True
    if linear and (scaled or kind == "yarn"):
        refuse_setting("rotary_seq_len_interpolation_factor", linear)
    if kind == "yarn":
        if percent != 1:  # Megatron's YaRN rotates the whole head
            refuse_setting("rotary_percent", percent)
        return {**fields, **_yarn_fields(args)}
    if scaled:
        factor = _real(args, "rope_scaling_factor", 8.0)
        return {**fields, "use_rope_scaling": True, "rope_scaling_factor": factor}
    if linear:
        return {**fields, "use_rope_scaling": True, "rope_scaling_type": "linear", "rope_scaling_factor": linear}
    return fields


def _yarn_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("yarn_correction_range_round_to_int", True) is not True:
        refuse_setting("yarn_correction_range_round_to_int", False)
    fields: dict[str, Any] = {"use_rope_scaling": True, "rope_scaling_type": "yarn"}
    for field, name in _YARN.items():
        sized = field == "original_max_position_embeddings"
        fields[field] = read_size(args, name, "args.") if sized else _real(args, name, 0.0)
    names = "yarn_mscale", "yarn_mscale_all_dim"
    if None not in map(args.get, names) and [args[name] for name in names] != [1.0, 0.0]:
        scales = [_real(args, name, 0.0) for name in names]
        fields["yarn_attention_factor"] = yarn_attention_factor(fields["rope_scaling_factor"], *scales)
    return fields


def rotary_args(arch: Architecture) -> dict[str, Any]:
    """Args for the position encoding. A scaling that Megatron does not have gives args that read back as another one."""
    rope = arch.position_embedding_type == "rope"
    kind = arch.rope_scaling_type if rope and arch.use_rope_scaling else None
    args: dict[str, Any] = {
        "position_embedding_type": "yarn" if kind == "yarn" else arch.position_embedding_type,
        "add_position_embedding": not rope,
        "use_rotary_position_embeddings": rope and kind != "yarn",
        "rotary_percent": arch.rotary_percent,
        "rotary_base": int(arch.rotary_base) if arch.rotary_base.is_integer() else arch.rotary_base,
        "rotary_interleaved": False,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": arch.rope_scaling_factor,
        "rotary_seq_len_interpolation_factor": arch.rope_scaling_factor if kind == "linear" else None,
    }
    if kind == "yarn":
        args |= {name: getattr(arch, field) for field, name in _YARN.items()}
        args |= {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True}
    return args


def _real(args: Mapping[str, Any], name: str, default: float) -> float:
    return read_real(args, name, default, "args.")
