"""One table per Hugging Face model: its names and matrices against the canonical ones, in both directions.

The invariant: what `to_huggingface` gives, `from_huggingface` takes back to the same bits.
"""

import re
from collections.abc import Mapping

from holdfast.conversion.model import OUTPUT_LAYER, WORD_EMBEDDINGS, Architecture, drop_tied_copy
from holdfast.conversion.tensors import Tensor, equal, vstack
from holdfast.system.errors import HoldfastError

GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
GPT2_TOP = {
    WORD_EMBEDDINGS: "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    OUTPUT_LAYER: "lm_head.weight",
}
LLAMA_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1_gate": "mlp.gate_proj",
    "mlp.linear_fc1_up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
LLAMA_TOP = {
    WORD_EMBEDDINGS: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT_LAYER: "lm_head.weight",
}
_BERT_HEADS = {
    WORD_EMBEDDINGS: "bert.embeddings.word_embeddings.weight",
    "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
    "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
    "pooler.dense.weight": "bert.pooler.dense.weight",
    "pooler.dense.bias": "bert.pooler.dense.bias",
    "lm_head.dense.weight": "cls.predictions.transform.dense.weight",
    "lm_head.dense.bias": "cls.predictions.transform.dense.bias",
    "lm_head.layer_norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "lm_head.layer_norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "output_layer.bias": "cls.predictions.bias",
    "binary_head.weight": "cls.seq_relationship.weight",
    "binary_head.bias": "cls.seq_relationship.bias",
    OUTPUT_LAYER: "cls.predictions.decoder.weight",
}
MEGATRON_BERT_TOP = {
    **_BERT_HEADS,
    "encoder.final_layernorm.weight": "bert.encoder.ln.weight",
    "encoder.final_layernorm.bias": "bert.encoder.ln.bias",
}
BERT_TOP = {
    **_BERT_HEADS,
    "embedding.layernorm.weight": "bert.embeddings.LayerNorm.weight",
    "embedding.layernorm.bias": "bert.embeddings.LayerNorm.bias",
}
_BERT_LAYER = {
    "self_attention.linear_proj": "attention.output.dense",
    "mlp.linear_fc1": "intermediate.dense",
    "mlp.linear_fc2": "output.dense",
}
MEGATRON_BERT_LAYER = {**_BERT_LAYER, "input_layernorm": "attention.ln", "pre_mlp_layernorm": "ln"}
BERT_LAYER = {
    **_BERT_LAYER,
    "post_attention_layernorm": "attention.output.LayerNorm",
    "post_mlp_layernorm": "output.LayerNorm",
}

# model_type → names outside the layers, names inside, the layers' prefix, and the names of q, k, v (one name: joined, as Conv1D).
TABLES: dict[str, tuple[dict[str, str], dict[str, str], str, tuple[str, ...]]] = {
    "gpt2": (GPT2_TOP, GPT2_LAYER, "transformer.h.", ("attn.c_attn",)),
    "llama": (LLAMA_TOP, LLAMA_LAYER, "model.layers.", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "megatron-bert": (
        MEGATRON_BERT_TOP, MEGATRON_BERT_LAYER, "bert.encoder.layer.",
        ("attention.self.query", "attention.self.key", "attention.self.value"),
    ),
    "bert": (
        BERT_TOP, BERT_LAYER, "bert.encoder.layer.",
        ("attention.self.query", "attention.self.key", "attention.self.value"),
    ),
}  # fmt: skip
BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|position_ids|inv_freq|\.token_type_ids)$")


def to_huggingface(model_type: str, arch: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors under Hugging Face's names and in its orientation, in the order of the model."""
    top, inside, prefix, qkv_names = TABLES[model_type]
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = re.match(rf"{arch.stack}\.layers\.(\d+)\.(.+)\.(weight|bias)$", name)
        if layer is None:
            found[top[name]] = tensor
            continue
        number, module, kind = layer.groups()
        if module == "self_attention.linear_qkv":
            parts = split_qkv(tensor, arch)
            if len(qkv_names) == 1:
                found[f"{prefix}{number}.{qkv_names[0]}.{kind}"] = _conv1d(vstack(parts))
            else:
                found |= {f"{prefix}{number}.{each}.{kind}": part for each, part in zip(qkv_names, parts, strict=True)}
        else:
            linear = model_type == "gpt2" and "linear" in module
            found[f"{prefix}{number}.{inside[module]}.{kind}"] = _conv1d(tensor) if linear else tensor
    return found


def from_huggingface(
    model_type: str, arch: Architecture, tensors: Mapping[str, Tensor], origin: str
) -> dict[str, Tensor]:
    """Hugging Face's tensors under canonical names, without buffers and without the copy of a tied embedding."""
    top, inside, prefix, qkv_names = TABLES[model_type]
    top_back, inside_back = {new: old for old, new in top.items()}, {new: old for old, new in inside.items()}
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
            module, linear = inside_back[layer[2]], model_type == "gpt2" and not layer[2].startswith("ln_")
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
    """Models saved without their head have no prefix; GPT-2's own files are like that."""
    wanted = {"gpt2": "transformer.", "llama": "model.", "bert": "bert.", "megatron-bert": "bert."}[model_type]
    if any(name.startswith(wanted) for name in tensors):
        return {_modern(name): tensor for name, tensor in tensors.items()}
    heads = ("lm_head.", "cls.")
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
