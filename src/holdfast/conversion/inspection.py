"""What `holdfast inspect` reports about a checkpoint: Megatron, torch_dist, Hugging Face, Holdfast. Reads, and runs nothing."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from holdfast.conversion.files.budget import Budget
from holdfast.conversion.files.torch_reader import is_torch_file, load_torch
from holdfast.conversion.megatron.rank_files import find_rank_files
from holdfast.conversion.model import Architecture, Model
from holdfast.conversion.sources import kind_of, read_model
from holdfast.inspection import DocumentSamples, PathDescription
from holdfast.system.errors import HoldfastError

# Names that Megatron's own checkpoints mention besides torch's; anything else is worth a line.
USUAL_NAMES = (
    "argparse.",
    "collections.",
    "numpy",
    "megatron.",
    "types.SimpleNamespace",
    "_codecs.encode",
    "builtins.",
    "pathlib.",
)

ARCHITECTURE_FACTS = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "max_position_embeddings", "padded_vocab_size", "norm_epsilon", "activation", "head_activation", "normalization",
    "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_type", "rope_scaling_factor", "qk_layernorm",
    "window_size", "window_attn_skip_freq", "use_parallel_residual", "tied", "bias", "qkv_bias", "post_norm", "token_types",
    "hidden_dropout", "attention_dropout",
)  # fmt: skip
BROKEN_OPCODES = 500_000
"""Of a file that could not be read as a model."""


def recognises(path: Path) -> bool:
    return kind_of(path) is not None


def describe(path: Path, samples: DocumentSamples) -> PathDescription:
    """Everything that is known without converting; a file that is not a model is described as far as it can be read."""
    kind = kind_of(path)
    try:
        model = read_model(path)
    except HoldfastError as error:
        return _describe_broken(path, str(kind), str(error))
    return _describe_model(str(kind), model)


def _describe_model(kind: str, model: Model) -> PathDescription:
    arch = model.architecture
    dtypes = Counter(tensor.dtype for tensor in model.tensors.values())
    parameters = sum(math.prod(tensor.shape) for tensor in model.tensors.values())
    odd = [name for name in model.facts.get("objects_not_loaded", []) if not name.startswith(USUAL_NAMES)]
    vocabulary = "unknown" if arch.vocab_size is None else f"{arch.vocab_size:,}"
    facts: dict[str, Any] = {
        **{key: value for key, value in model.facts.items() if key not in ("kind", "config")},
        "form": kind,
        "origin": model.origin,
        "iteration": model.iteration,
        "parameters": parameters,
        "tensors": len(model.tensors),
        "dtypes": dict(dtypes),
        "architecture": _architecture(arch),
        "notes": model.notes,
    }
    shape = f"{arch.num_layers} layers × {arch.hidden_size}, {arch.num_attention_heads} heads"
    if arch.num_query_groups != arch.num_attention_heads:
        shape += f" in {arch.num_query_groups} groups"
    lines = [
        f"  {model.origin}" + (f", iteration {model.iteration:,}" if model.iteration is not None else ""),
        f"  {arch.model_type.upper()}, {shape}, MLP {arch.ffn_hidden_size}, {arch.max_position_embeddings} positions",
        f"  {parameters:,} parameters in {len(model.tensors)} tensors, "
        + ", ".join(f"{dtype} × {count}" for dtype, count in dtypes.items()),
        f"  vocabulary {vocabulary}, {arch.padded_vocab_size:,} with padding",
        f"  {arch.activation}, {arch.normalization} with epsilon {arch.norm_epsilon:g}, "
        f"{arch.position_embedding_type} positions, {'tied' if arch.tied else 'separate'} output matrix{_options(arch)}",
        f"  optimizer state: {'yes' if model.facts.get('optimizer') else 'no'}",
        *(f"  {note}" for note in model.notes),
        *(f"  mentions {name}, which was not loaded" for name in odd),
    ]
    return PathDescription(facts, lines)


def _options(arch: Architecture) -> str:
    """The options of newer families that are on, in words."""
    words = {
        "scaled rotary frequencies": arch.use_rope_scaling,
        f"{arch.rotary_percent:.0%} of each head rotated": arch.rotary_percent < 1,
        "bias on queries, keys and values only": arch.qkv_bias and not arch.bias,
        "norms on queries and keys": arch.qk_layernorm,
        f"a window of {arch.window_size[0] + 1 if arch.window_size else 0:,} tokens": bool(arch.window_size),
        "not in every layer": bool(arch.window_attn_skip_freq),
        "parallel residual": arch.use_parallel_residual,
        "norms before and after each block": arch.post_block_norm,
        f"attention scores within ±{arch.attn_logit_softcapping:g}": bool(arch.attn_logit_softcapping),
        f"logits within ±{arch.final_logit_softcapping:g}": bool(arch.final_logit_softcapping),
    }
    return "".join(f", {text}" for text, on in words.items() if on)


def _architecture(arch: Architecture) -> dict[str, Any]:
    """The facts of `inspect --json`, some of them under shorter names than Megatron's."""
    renamed = {
        "family": arch.model_type,
        "true_vocab_size": arch.vocab_size,
        "vocab_multiple": arch.make_vocab_size_divisible_by,
        "positions": arch.position_embedding_type,
        "binary_head": not arch.bert_no_binary_head,
    }
    return {**{name: getattr(arch, name) for name in ARCHITECTURE_FACTS}, **renamed}


def _describe_broken(path: Path, kind: str, error: str) -> PathDescription:
    names: set[str] = set()
    serialisation = None
    try:
        budget = Budget(opcodes=BROKEN_OPCODES)
        regions = [region for _, _, region in find_rank_files(path, budget)] if kind == "megatron" else []
        for region in regions:
            if is_torch_file(region):
                loaded = load_torch(region, budget)
                names |= loaded.names
                serialisation = loaded.serialisation
    except HoldfastError:
        pass  # `error` has the reason
    lines = [f"  {path.stat().st_size:,} bytes" if path.is_file() else f"  {kind} folder"]
    lines += [f"  mentions {name}, which was not loaded" for name in sorted(names)]
    return PathDescription(
        {"form": kind, "serialisation": serialisation, "objects_not_loaded": sorted(names)}, lines, [error]
    )
