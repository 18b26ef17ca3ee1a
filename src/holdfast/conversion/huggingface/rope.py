"""rope_parameters of a config.json (rope_theta and rope_scaling in older ones) ↔ the rotary fields of Architecture."""

from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast.conversion.huggingface.families import ModelClass
from holdfast.conversion.model import Architecture, read_real, read_size, yarn_attention_factor
from holdfast.system.errors import HoldfastError

# rope_type → field of Architecture → its key; `factor` and the original length are read for themselves.
_REALS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "llama3": {"rope_low_freq_factor": "low_freq_factor", "rope_high_freq_factor": "high_freq_factor"},
    "yarn": {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attention_factor": "attention_factor"},
}
_ORIGINAL = "original_max_position_embeddings"
_KNOWN = {
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", _ORIGINAL, "mscale", "mscale_all_dim",
    *(key for keys in _REALS.values() for key in keys.values()),
}  # fmt: skip


def rotary_fields(config: Mapping[str, Any], family: ModelClass, origin: str) -> dict[str, Any]:
    """The rotary fields of Architecture that a config.json states; {} for a class without rotary positions."""
    if family.rotary is None:
        return {}
    base_key, part_key, part = family.rotary
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise HoldfastError(f"{origin}: rope_parameters is not an object")
    where, stated = f"{origin}: ", {**rope, **scaling}
    theta = read_real(config, base_key, 10000.0, where)
    part = read_real(stated, "partial_rotary_factor", read_real(config, part_key, part, where), where)
    if part != 1 and not part_key:
        _refuse("partial_rotary_factor", part, origin)
    fields = {"rotary_base": read_real(stated, "rope_theta", theta, where), "rotary_percent": part}
    kind = stated.get("rope_type", stated.get("type", "default"))
    if not isinstance(kind, str) or kind not in _REALS:
        _refuse("rope_type", kind, origin)
    unknown = [key for key, value in stated.items() if key not in _KNOWN and value is not None]
    if unknown and not (unknown == ["truncate"] and stated["truncate"] is True):
        _refuse(unknown[0], stated[unknown[0]], origin)
    return fields if kind == "default" else {**fields, **_scaling(kind, stated, config, where)}


def _scaling(kind: str, stated: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    longest = read_size(config, "max_position_embeddings", where)
    fields: dict[str, Any] = {"use_rope_scaling": True, "rope_scaling_type": kind}
    original = longest
    if kind in ("llama3", "yarn"):
        holder = next((each for each in (config, stated) if each.get(_ORIGINAL)), {_ORIGINAL: longest})
        original = read_size(holder, _ORIGINAL, where)
        fields[_ORIGINAL] = original
    factor = fields["rope_scaling_factor"] = read_real(stated, "factor", longest / original, where)
    if kind == "dynamic":  # transformers accepts longer sequences than max_position_embeddings, and scales beyond it
        fields |= {_ORIGINAL: longest, "max_position_embeddings": int(longest * factor)}
    for field, key in _REALS[kind].items():
        if stated.get(key) is not None:
            fields[field] = read_real(stated, key, 0.0, where)
    scales = [read_real(stated, key, 0.0, where) for key in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and all(scales) and "yarn_attention_factor" not in fields:
        fields["yarn_attention_factor"] = yarn_attention_factor(factor, *scales)
    return fields


def rope_parameters(arch: Architecture, family: ModelClass) -> dict[str, Any]:
    """The keys of config.json for these rotary fields, under the names of old and new versions of transformers."""
    if family.rotary is None:
        return {}
    base_key, part_key, _ = family.rotary
    rope: dict[str, Any] = {"rope_theta": arch.rotary_base, "rope_type": "default"}
    found: dict[str, Any] = {base_key: arch.rotary_base, "rope_parameters": rope}
    if part_key:
        found[part_key] = rope["partial_rotary_factor"] = arch.rotary_percent
    if not arch.use_rope_scaling:
        return found
    kind = arch.rope_scaling_type
    scaling: dict[str, Any] = {"rope_type": kind, "factor": arch.rope_scaling_factor}
    if kind in ("llama3", "yarn"):
        scaling[_ORIGINAL] = arch.original_max_position_embeddings
    if kind == "dynamic":
        found["max_position_embeddings"] = arch.original_max_position_embeddings
    values = {key: getattr(arch, field) for field, key in _REALS[kind].items()}
    scaling |= {key: value for key, value in values.items() if value is not None}
    rope |= scaling
    return {**found, "rope_scaling": scaling}


def _refuse(name: str, value: Any, origin: str) -> NoReturn:
    raise HoldfastError(f"{origin}: {name} = {value} cannot be converted exactly")
