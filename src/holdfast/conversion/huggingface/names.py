"""Tensors under Hugging Face's names ↔ canonical ones, by the table of families, in both directions.

The invariant: what `to_huggingface` gives, `from_huggingface` takes back to the same bits.
"""

import re
from collections.abc import Mapping

from holdfast.conversion.huggingface.families import FAMILIES
from holdfast.conversion.model import OUTPUT_LAYER, Architecture, drop_tied_copy
from holdfast.conversion.tensors import Tensor, equal, vstack
from holdfast.system.errors import HoldfastError

BUFFERS = re.compile(r"(\.(attn|attention)\.(masked_)?bias|position_ids|inv_freq|\.token_type_ids)$")


def to_huggingface(model_type: str, arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors under Hugging Face's names and in its orientation, in the order of the model."""
    family = FAMILIES[model_type]
    prefix, qkv_names = family.layers, family.qkv
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = re.match(rf"{arch.stack}\.layers\.(\d+)\.(.+)\.(weight|bias)$", name)
        if layer is None:
            found[family.top[name]] = tensor
            continue
        number, module, kind = layer.groups()
        if module == "self_attention.linear_qkv" and qkv_names:
            parts = split_qkv(tensor, arch)
            if len(qkv_names) == 1:
                found[f"{prefix}{number}.{qkv_names[0]}.{kind}"] = _conv1d(vstack(parts))
            else:
                found |= {f"{prefix}{number}.{each}.{kind}": part for each, part in zip(qkv_names, parts, strict=True)}
        else:
            linear = family.transposed and "linear" in module
            found[f"{prefix}{number}.{family.inside[module]}.{kind}"] = _conv1d(tensor) if linear else tensor
    return found


def from_huggingface(
    model_type: str, arch: Architecture, tensors: Mapping[str, Tensor], origin: str
) -> dict[str, Tensor]:
    """Hugging Face's tensors under canonical names, without buffers and without the copy of a tied embedding."""
    family = FAMILIES[model_type]
    prefix, qkv_names = family.layers, family.qkv
    top_back = {new: old for old, new in family.top.items()}
    inside_back = {new: old for old, new in family.inside.items()}
    plain = with_prefixes(model_type, tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if BUFFERS.search(name):
            continue
        if name in top_back:
            found[top_back[name]] = tensor
            continue
        layer = re.match(rf"{re.escape(prefix)}(\d+)\.(.+)\.(weight|bias)$", name)
        if name == "cls.predictions.decoder.bias":
            if "cls.predictions.bias" in plain and not equal(tensor, plain["cls.predictions.bias"]):
                raise HoldfastError(f"{origin}: {name} differs from cls.predictions.bias, to which it is tied")
            found["output_layer.bias"] = tensor
        elif layer and layer[2] in inside_back:
            module = inside_back[layer[2]]
            linear = family.transposed and "linear" in module
            found[f"{arch.stack}.layers.{layer[1]}.{module}.{layer[3]}"] = _conv1d(tensor) if linear else tensor
        elif not layer or layer[2] not in qkv_names:
            raise HoldfastError(f"{origin}: {name} is a parameter that Holdfast cannot convert exactly")
    for number in range(arch.num_layers):
        for kind in ("weight", "bias"):
            names = [f"{prefix}{number}.{each}.{kind}" for each in qkv_names]
            if any(name in plain for name in names):
                missing = [name for name in names if name not in plain]
                if missing:
                    raise HoldfastError(f"{origin}: {missing[0]} is missing")
                parts = [plain[name] for name in names]
                target = f"{arch.stack}.layers.{number}.self_attention.linear_qkv.{kind}"
                found[target] = join_qkv(_thirds(_conv1d(parts[0])) if len(parts) == 1 else parts, arch, origin)
    return drop_tied_copy(arch, found, f"{origin}: the output matrix", "the settings")


def with_prefixes(model_type: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Models saved without their head have no prefix; GPT-2's own files are like that. transformers 5 calls the output matrix of
    GPT-NeoX lm_head, and saves it so on request."""
    wanted, output = FAMILIES[model_type].stem, FAMILIES[model_type].top[OUTPUT_LAYER]
    if output == "embed_out.weight" and output not in tensors:
        tensors = {output if name == "lm_head.weight" else name: tensor for name, tensor in tensors.items()}
    if any(name.startswith(wanted) for name in tensors):
        return {_modern(name): tensor for name, tensor in tensors.items()}
    heads = ("lm_head.", "cls.", "embed_out.")
    return {_modern(name if name.startswith(heads) else wanted + name): tensor for name, tensor in tensors.items()}


def _modern(name: str) -> str:
    """BERT files converted from TensorFlow have gamma and beta."""
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _conv1d(tensor: Tensor) -> Tensor:
    return tensor.transposed() if len(tensor.shape) == 2 else tensor


def _thirds(tensor: Tensor) -> list[Tensor]:
    rows = tensor.shape[0] // 3
    return [tensor.rows(index * rows, (index + 1) * rows) for index in range(3)]


def split_qkv(tensor: Tensor, arch: Architecture) -> list[Tensor]:
    """[groups, heads per group + 2, width] rows → queries, keys, values."""
    width, groups = arch.kv_channels, arch.num_query_groups
    queries = arch.num_attention_heads // groups
    step = (queries + 2) * width
    spans = ((0, queries * width), (queries * width, (queries + 1) * width), ((queries + 1) * width, step))
    return [vstack([tensor.rows(group * step + a, group * step + b) for group in range(groups)]) for a, b in spans]


def join_qkv(parts: list[Tensor], arch: Architecture, origin: str) -> Tensor:
    """Queries, keys, values → [groups, heads per group + 2, width] rows."""
    width, groups = arch.kv_channels, arch.num_query_groups
    queries = arch.num_attention_heads // groups * width
    rows = [part.shape[0] for part in parts]
    if rows != [groups * queries, groups * width, groups * width]:
        raise HoldfastError(f"{origin}: query, key and value have {rows} rows, which contradicts the configured heads")
    found = []
    for group in range(groups):
        found.append(parts[0].rows(group * queries, (group + 1) * queries))
        found += [part.rows(group * width, (group + 1) * width) for part in parts[1:]]
    return vstack(found)
