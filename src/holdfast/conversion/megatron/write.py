"""Plans Megatron checkpoints in the torch format: release/mp_rank_TT[_PPP]/model_optim_rng.pt for any TP × PP, plus the tracker.

The invariant: joining what is planned here with the reader gives back the same bits; padding is the model's own where a side
file kept it, else the last row repeated, as Megatron's tools do.
"""

import re
from argparse import Namespace
from dataclasses import replace
from typing import Any, Literal

from holdfast.conversion.files.pickles import Global
from holdfast.conversion.megatron.args import architecture_from_args, args_for
from holdfast.conversion.megatron.names import legacy_name, shard_kind
from holdfast.conversion.model import (
    OUTPUT_LAYER,
    VOCABULARY_TENSORS,
    WORD_EMBEDDINGS,
    Architecture,
    Model,
    expected_shapes,
    function_of,
    padded_size,
)
from holdfast.conversion.stream import PlannedFile, WritePlan
from holdfast.conversion.tensors import DTYPE_NAMES, Tensor, repeated, vstack
from holdfast.system.errors import HoldfastError, UsageError

Names = Literal["mcore", "legacy"]
CORE_ONLY = ("add_qkv_bias", "qk_layernorm", "window_size", "window_attn_skip_freq", "use_rope_scaling")
"""Options that only Megatron-core has."""


def plan_megatron(
    model: Model,
    dtype: str | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    version: float,
    names: Names,
) -> WritePlan:
    arch = model.architecture
    _check(arch, tensor_parallel, pipeline_parallel, version, names)
    true_size = arch.vocabulary()
    padded = padded_size(true_size, arch.make_vocab_size_divisible_by * tensor_parallel)
    whole = {
        name: (pad_rows(tensor, true_size, padded, model.padding.get(name)) if name in VOCABULARY_TENSORS else tensor)
        for name in expected_shapes(arch)  # the order of the modules, on which old readers rely
        for tensor in [model.tensors[name]]
    }
    if dtype is not None:
        whole = {name: tensor.cast(dtype) for name, tensor in whole.items()}
    stages = stage_sizes(arch.num_layers, pipeline_parallel)
    args = args_for(arch, true_size, padded, tensor_parallel, stages, names == "mcore")
    _check_function(arch, architecture_from_args(args, whole, arch.model_type, names == "mcore"))
    written = next(iter(whole.values())).dtype
    args |= {"params_dtype": Global("torch", DTYPE_NAMES[written]), "fp16": written == "F16", "bf16": written == "BF16"}
    if model.tokenizer.get("tokenizer_type"):
        args["tokenizer_type"] = model.tokenizer["tokenizer_type"]
    elif names == "legacy" and args["tokenizer_type"] is None:  # old readers stop without one
        args["tokenizer_type"] = "BertWordPieceLowerCase" if arch.model_type == "bert" else "GPT2BPETokenizer"
    files = [PlannedFile("latest_checkpointed_iteration.txt", content=b"release")]
    for stage in range(pipeline_parallel):
        owned = _stage(arch, whole, stage, stages)
        for rank in range(tensor_parallel):
            shard = {}
            for name, tensor in join_gate(owned).items():
                shard[name] = shard_of(name, tensor, rank, tensor_parallel, arch)
            folder = f"mp_rank_{rank:02d}" if pipeline_parallel == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
            state = _legacy_tree(shard, arch.tied) if names == "legacy" else shard
            tree = {
                "args": Namespace(**args),
                "checkpoint_version": version,
                "iteration": model.iteration or 0,
                "model": state,
            }
            files.append(PlannedFile(f"release/{folder}/model_optim_rng.pt", shard, tree=tree))
    notes = []
    if names == "mcore" and arch.model_type == "bert" and arch.head_activation == "gelu_tanh":
        notes.append(
            "Megatron-core's BERT head has the exact GELU, this model's the tanh form: its activations differ by at most 4.8e-4 "
            "(--megatron-names legacy keeps them)"
        )
    if model.facts.get("optimizer"):
        notes.append("optimizer state not converted: the release form has weights only")
    return WritePlan(files, notes)


def _check(arch: Architecture, tensor_parallel: int, pipeline_parallel: int, version: float, names: Names) -> None:
    if version not in (2.0, 3.0):
        raise UsageError(f"--checkpoint-version {version}: Megatron checkpoints are written as version 2.0 or 3.0")
    if arch.post_norm:
        raise HoldfastError(
            "Megatron has no BERT with the norms after each block (the original); convert it --to hf or --to holdfast"
        )
    if tensor_parallel < 1 or pipeline_parallel < 1:
        raise UsageError("--tensor-model-parallel-size and --pipeline-model-parallel-size must be at least 1")
    for what, size in (
        ("heads", arch.num_attention_heads), ("query groups", arch.num_query_groups), ("MLP rows", arch.ffn_hidden_size),
    ):  # fmt: skip
        if size % tensor_parallel:
            raise HoldfastError(f"{size} {what} cannot be divided among {tensor_parallel} tensor ranks")
    if pipeline_parallel > arch.num_layers:
        raise HoldfastError(f"{arch.num_layers} layers are fewer than {pipeline_parallel} pipeline stages")
    new = [name for name in CORE_ONLY if getattr(arch, name)]
    if names == "legacy" and new:
        raise HoldfastError(f"legacy Megatron has no {', '.join(new)}; convert with --megatron-names mcore")


def _check_function(arch: Architecture, written: Architecture) -> None:
    """Refuses a model whose args, read back, describe another function: Megatron has no args for it."""
    ours, theirs = function_of(arch), function_of(written)
    differing = [
        f"{key} = {theirs.get(key)}, not {value}"
        for key, value in ours.items()
        if theirs.get(key) != value and key != "vocab_size"
    ]
    if differing:
        raise HoldfastError(f"Megatron's args cannot describe this model; the nearest has {'; '.join(differing)}")


def pad_rows(tensor: Tensor, true_size: int, padded: int, kept: Tensor | None) -> Tensor:
    """A vocabulary table with `padded` rows: its own as far as they go, then kept ones, then its last row repeated."""
    if tensor.shape[0] >= padded:
        return tensor.rows(0, padded)
    parts = [tensor]
    rows = tensor.shape[0]
    if kept is not None and rows == true_size and kept.stored == tensor.stored:
        parts.append(kept.rows(0, min(kept.shape[0], padded - rows)))
        rows += parts[-1].shape[0]
    last = tensor.rows(true_size - 1, true_size)
    return vstack([*parts, repeated(last, padded - rows)] if padded > rows else parts)


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Layers of each pipeline stage. All but the first and the last are equal: Megatron-core has no args for anything else."""
    if stages < 3 or layers % stages == 0:
        return [layers // stages + (index < layers % stages) for index in range(stages)]
    candidates = []
    for middle in (layers // stages, layers // stages + 1):
        ends = layers - middle * (stages - 2)
        if ends >= 2:
            candidates.append([ends - ends // 2, *[middle] * (stages - 2), ends // 2])
    return min(candidates, key=max)


def _stage(arch: Architecture, whole: dict[str, Tensor], stage: int, counts: list[int]) -> dict[str, Tensor]:
    """The tensors of one pipeline stage, layers renumbered from 0; the last one holds a copy of a tied embedding."""
    start, stop = sum(counts[:stage]), sum(counts[: stage + 1])
    first, last = stage == 0, stage == len(counts) - 1
    owned: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        layer = re.match(r"((?:decoder|encoder)\.layers\.)(\d+)(\..+)", name)
        if layer:
            if start <= int(layer[2]) < stop:
                owned[f"{layer[1]}{int(layer[2]) - start}{layer[3]}"] = tensor
        elif (first and name.startswith("embedding.")) or (last and not name.startswith("embedding.")):
            owned[name] = tensor
    if last and not first and arch.tied:
        owned[OUTPUT_LAYER] = replace(whole[WORD_EMBEDDINGS])
    return owned


def join_gate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gate and up projections under the one name that Megatron has for both."""
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "linear_fc1_gate" in name:
            joined[name.replace("_gate", "")] = vstack([tensor, tensors[name.replace("_gate", "_up")]])
        elif "linear_fc1_up" not in name:
            joined[name] = tensor
    return joined


def shard_of(name: str, tensor: Tensor, rank: int, ranks: int, arch: Architecture) -> Tensor:
    """One rank's share of a whole tensor."""
    kind = shard_kind(name, arch.gated)
    if kind == "whole":
        return replace(tensor)
    if kind == "gated":
        half = tensor.shape[0] // 2
        gate, up = tensor.rows(0, half), tensor.rows(half, 2 * half)
        return vstack([_share(gate, rank, ranks), _share(up, rank, ranks)])
    if kind == "columns":
        return _share(tensor.transposed(), rank, ranks).transposed()
    return _share(tensor, rank, ranks)


def _share(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    rows = tensor.shape[0] // ranks
    return tensor.rows(rank * rows, (rank + 1) * rows)


def _legacy_tree(shard: dict[str, Tensor], tied: bool) -> dict[str, Any]:
    """Nested like Megatron-LM's own models: a flat dict below each of embedding's tables, encoder, pooler and heads."""
    model: dict[str, Any] = {}
    for name, tensor in shard.items():
        if name == OUTPUT_LAYER and tied:
            model.setdefault("word_embeddings_for_head", {})["weight"] = tensor
            continue
        path = legacy_name(name)
        head, _, rest = path.partition(".")
        if head == "language_model":
            part, _, rest = rest.partition(".")
            place = model.setdefault(head, {}).setdefault(part, {})
            if part == "embedding":
                table, _, rest = rest.partition(".")
                place = place.setdefault(table, {})
        else:
            place = model.setdefault(head, {})
        place[rest] = tensor
    return model
