"""Reads Megatron checkpoints in the torch format: release zip, file, iteration folder or run, any TP × PP × VPP, any epoch.

The invariant: all ranks are there, of one iteration and one layout; replicated copies are equal bit for bit; the layers of all
stages add up. Anything else is refused with the name of the file.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.conversion.files.budget import Budget
from holdfast.conversion.megatron.args import (
    HEADS_UNKNOWN,
    architecture_from_args,
    architecture_from_shapes,
    true_size_from_args,
    true_size_of_release,
)
from holdfast.conversion.megatron.names import canonical_name, shard_kind
from holdfast.conversion.megatron.rank_files import RankFile, flatten, read_ranks
from holdfast.conversion.megatron.settings import check_settings
from holdfast.conversion.model import (
    WORD_EMBEDDINGS,
    Model,
    check_complete,
    check_heads,
    drop_tied_copy,
    with_vocabulary,
)
from holdfast.conversion.tensors import Tensor, equal, hstack, vstack
from holdfast.system.errors import HoldfastError

VERSIONS = (0.0, 1.0, 2.0, 3.0)
MAX_ITERATION = 1 << 40
"""From here on a file is forged; the number becomes part of a folder's name."""


def read_megatron(path: Path, heads: int | None, version: float | None, ignored: Collection[str]) -> Model:
    """The whole model out of all ranks' files."""
    budget = Budget()
    ranks = read_ranks(path, budget)
    args = ranks[0].args
    width, depth = 1 + max(rank.tensor_rank for rank in ranks), 1 + max(rank.stage for rank in ranks)
    _check_grid(ranks, args, width, depth)
    parts = _canonical_parts(ranks)
    bert = any("tokentype" in name for chunk in parts for name in chunk[0][0])
    mcore = any(
        ".linear_qkv" in name for rank in ranks for chunk in rank.chunks() for name, _ in flatten(chunk, rank.file.name)
    )
    version, version_note = _version(ranks[0], version, mcore)
    swiglu = args.get("swiglu") is True
    layers = sum(len(_layers(part[0][0])) for part in parts)
    layouts = _Layouts(version, swiglu, args, heads, width, layers)
    tensors = _join(parts, layouts)
    if bert:
        tensors = {re.sub(r"^decoder\.", "encoder.", name): tensor for name, tensor in tensors.items()}
    stubs = sorted({name for rank in ranks for name in rank.file.names})
    chunks, naming = len(ranks[0].chunks()), "mcore" if mcore else "legacy"
    return megatron_model(
        path,
        tensors,
        args,
        model_type="bert" if bert else "gpt",
        mcore=mcore,
        width=width,
        heads=heads,
        notes=[*([version_note] if version_note else []), *check_settings(args, ignored)],
        origin=f"Megatron torch format, {naming} names, version {version}, TP {width} × PP {depth} × VPP {chunks}",
        iteration=ranks[0].content.get("iteration", ranks[0].content.get("total_iters")),
        facts={
            "kind": "megatron", "names": naming, "checkpoint_version": version,
            "tensor_parallel": width, "pipeline_parallel": depth, "virtual_pipeline": chunks,
            "serialisation": ranks[0].file.serialisation, "objects_not_loaded": stubs,
            "optimizer": "optimizer" in ranks[0].content, "args": bool(args),
        },
        regions=[rank.file.region for rank in ranks],
        unchecked=budget.unchecked,
    )  # fmt: skip


def megatron_model(
    path: Path,
    tensors: dict[str, Tensor],
    args: Mapping[str, Any],
    *,
    model_type: Literal["gpt", "bert"],
    mcore: bool,
    width: int,
    heads: int | None,
    iteration: Any,
    notes: list[str],
    facts: dict[str, Any],
    **rest: Any,
) -> Model:
    """The model of whole tensors: its architecture and vocabulary from `args`, or from the shapes of a file without args."""
    if args:
        arch = architecture_from_args(args, tensors, model_type, mcore)
        true_size, stated_by = true_size_from_args(args, arch.padded_vocab_size, width)
    else:
        arch, assumed = architecture_from_shapes(tensors, model_type, heads)
        true_size, stated_by = true_size_of_release(arch) if facts["kind"] == "megatron" else (None, "")
        notes = [*notes, *assumed]
    tensors = drop_tied_copy(arch, tensors, f"{path}: the last stage's copy of the embedding", "the args")
    check_complete(arch, tensors, str(path))
    kind = args.get("tokenizer_type")
    tokenizer = {"tokenizer_type": kind} if isinstance(kind, str) else {}
    known = type(iteration) is int and 0 <= iteration < MAX_ITERATION
    step = iteration if known else None
    model = Model(arch, tensors, iteration=step, notes=notes, facts=facts, tokenizer=tokenizer, **rest)
    if true_size is not None:
        model = with_vocabulary(model, true_size, stated_by)
        model.notes.append(f"true vocabulary size {true_size}, from {stated_by}")
    return model


def _check_grid(ranks: list[RankFile], args: Mapping[str, Any], width: int, depth: int) -> None:
    stated = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or width
    for name, declared, present in (
        ("tensor_model_parallel_size", stated, width),
        ("pipeline_model_parallel_size", args.get("pipeline_model_parallel_size") or depth, depth),
    ):
        if declared != present:
            raise HoldfastError(
                f"{ranks[0].file.name}: args have {name} = {declared}, but there are files of {present}: "
                "rank files are missing or do not belong together"
            )
    for key in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"):
        for rank in ranks:
            if rank.args.get(key) != args.get(key):
                raise HoldfastError(
                    f"{rank.file.name}: args.{key} = {rank.args.get(key)}, but the first rank has {args.get(key)}"
                )


def _version(rank: RankFile, wanted: float | None, mcore: bool) -> tuple[float, str]:
    stated = rank.content.get("checkpoint_version")
    if wanted is not None:
        if wanted not in VERSIONS:
            raise HoldfastError(f"--checkpoint-version {wanted}: choose 0, 1.0, 2.0 or 3.0")
        note = f"checkpoint version {wanted} from the flag; the file has {stated}" if wanted != stated else ""
        return float(wanted), note
    version = stated if stated is not None else 3.0 if mcore else 0.0
    if version not in VERSIONS:
        raise HoldfastError(
            f"{rank.file.name}: checkpoint version {version} is unknown; choose one with --checkpoint-version"
        )
    return float(version), ""


# A part is one pipeline stage's chunk: for each tensor rank its canonical tensors, and the rank's file name.
Part = list[tuple[dict[str, Tensor], str]]


def _canonical_parts(ranks: list[RankFile]) -> list[Part]:
    """Chunks in the order of their layers: all stages' first chunks, then all stages' second chunks, and so on."""
    by_place = {(rank.stage, rank.tensor_rank): rank for rank in ranks}
    stages, width = 1 + max(rank.stage for rank in ranks), 1 + max(rank.tensor_rank for rank in ranks)
    chunks = len(ranks[0].chunks())
    parts = []
    for chunk in range(chunks):
        for stage in range(stages):
            part: Part = []
            for index in range(width):
                rank = by_place[stage, index]
                models = rank.chunks()
                if len(models) != chunks:
                    raise HoldfastError(f"{rank.file.name} has {len(models)} model chunks, the first rank has {chunks}")
                part.append((_canonical(models[chunk], rank.file.name), rank.file.name))
            parts.append(part)
    return parts


def _canonical(model: Any, file: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, stored in flatten(model, file):
        try:
            canonical = canonical_name(name, "decoder")
            if canonical is None:
                continue
            tensor = stored.tensor()
            if not tensor.shape:
                raise HoldfastError("a single number, where weights are expected")
            if re.match(r"decoder\.layers\.\D", canonical):
                raise HoldfastError("a layer without its number")
        except HoldfastError as error:
            raise HoldfastError(f"{file}: {name}: {error}" if name not in str(error) else f"{file}: {error}") from None
        if canonical in tensors and not equal(tensors[canonical], tensor):
            raise HoldfastError(f"{file}: {name} and another parameter are both {canonical}")
        tensors[canonical] = tensor
    return tensors


@dataclass(frozen=True)
class _Layouts:
    """Row orders inside one tensor rank, brought to the canonical ones before ranks are joined."""

    version: float
    swiglu: bool
    args: Mapping[str, Any]
    heads: int | None
    width: int
    layers: int

    def qkv(self, tensor: Tensor) -> Tensor:
        if self.version >= 2:
            return tensor
        heads = (
            self.args.get("num_attention_heads") or self.heads or (16 if tensor.shape[0] * self.width == 3072 else None)
        )
        if type(heads) is not int:
            raise HoldfastError(HEADS_UNKNOWN)
        check_heads(self.layers, heads)
        local, remainder = divmod(heads, self.width)
        if remainder or not local or tensor.shape[0] % (3 * local):
            raise HoldfastError(
                f"{heads} attention heads do not fit {self.width} ranks of {tensor.shape[0]} query, key and value rows"
            )
        head = tensor.shape[0] // (3 * local)
        if self.version == 0:
            return tensor.reordered((3, local, head), (1, 0, 2))
        return tensor.reordered((local, head, 3), (0, 2, 1))


def _join(parts: list[Part], layouts: _Layouts) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    offset = 0
    for part in parts:
        names = part[0][0].keys()
        for canonical, file in part:
            if canonical.keys() != names:
                odd = sorted(canonical.keys() ^ names)[0]
                raise HoldfastError(f"{file}: {odd} is not in all tensor ranks of this stage")
        layers = _layers(names)
        if layers and layers != set(range(len(layers))):
            raise HoldfastError(f"{part[0][1]}: layers {sorted(layers)} are not numbered from 0 without a gap")
        for name in names:
            shards = [canonical[name] for canonical, _ in part]
            for target, tensor in _join_shards(name, shards, [file for _, file in part], layouts).items():
                place = _shift_layer(target, offset)
                if place in tensors and not equal(tensors[place], tensor):
                    raise HoldfastError(f"{part[0][1]}: its copy of {place} differs from an earlier stage's")
                tensors[place] = tensor
        offset += len(layers)
    if WORD_EMBEDDINGS not in tensors:
        raise HoldfastError(f"{parts[0][0][1]}: {WORD_EMBEDDINGS} is missing")
    return tensors


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := re.match(r"decoder\.layers\.(\d{1,6})\.", name))}


def _shift_layer(name: str, offset: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + offset)
    return ".".join(parts)


def _join_shards(name: str, shards: list[Tensor], files: list[str], layouts: _Layouts) -> dict[str, Tensor]:
    cut = shard_kind(name, layouts.swiglu)
    try:
        if cut == "whole":
            for shard, file in zip(shards, files, strict=True):
                if not equal(shards[0], shard):
                    raise HoldfastError(f"{file}: its copy of {name} differs from that in {files[0]}")
            return {name: shards[0]}
        if cut == "columns":
            return {name: hstack(shards)}
        if cut == "qkv":
            return {name: vstack([layouts.qkv(shard) for shard in shards])}
        if cut == "gated":
            return split_gate(name, shards)
        return {name: vstack(shards)}
    except HoldfastError as error:
        raise HoldfastError(f"{files[0]}: {name}: {error}" if name not in str(error) else str(error)) from None


def split_gate(name: str, shards: list[Tensor]) -> dict[str, Tensor]:
    """SwiGLU's first matrix is [gate; up] inside each rank."""
    half = shards[0].shape[0] // 2
    kind = name.rsplit(".", 1)[1]
    base = name.removesuffix(f".{kind}")
    return {
        f"{base}_gate.{kind}": vstack([shard.rows(0, half) for shard in shards]),
        f"{base}_up.{kind}": vstack([shard.rows(half, 2 * half) for shard in shards]),
    }
