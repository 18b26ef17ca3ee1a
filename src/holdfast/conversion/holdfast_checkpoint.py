"""Holdfast's own checkpoints as source and target: no renaming, the canonical names are theirs.

The invariant: `holdfast train --load` and `holdfast.checkpoint` read what is written here; every byte has its checksum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from holdfast.checkpoint.layout import TensorSlice, lay_out
from holdfast.checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    checksum_chunks,
    describe_shard,
    shard_name,
    write_manifest,
)
from holdfast.checkpoint.plan import plan_hash
from holdfast.checkpoint.reader import open_checkpoint
from holdfast.config import Config, DataConfig, ModelConfig, config_from_tables, config_to_toml, read_config
from holdfast.conversion.files.zips import map_file
from holdfast.conversion.huggingface.tokenizer_files import check_size
from holdfast.conversion.megatron.write import pad_rows
from holdfast.conversion.model import (
    SPECIAL_IDS,
    VOCABULARY_TENSORS,
    WORD_EMBEDDINGS,
    Architecture,
    Model,
    check_complete,
    padded_size,
    read_size,
    valid_ids,
)
from holdfast.conversion.stream import PlannedFile, WritePlan
from holdfast.conversion.tensors import WIDTHS, MatrixPiece, Tensor, bits_type
from holdfast.system.bounded_files import read_bounded
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.folder import KEYS, folder_contents, folder_names, read_folder

MAX_CONFIG_BYTES = 1 << 20
HEAD_NOTE = (
    "BERT's trunk uses the tanh GELU and its language model head the exact one; Holdfast has the tanh form in both, so the "
    "head's activations differ by at most 4.8e-4"
)


def is_holdfast(path: Path) -> bool:
    if (path / FILE_NAME).is_file():
        return True
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return any(entry.name.startswith("step-") for entry in checkpoints.iterdir() if entry.is_dir())


class TrainingState(Protocol):
    """A state of a run: a checkpoint on disk, or a snapshot in memory."""

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def step(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def shared(self) -> dict[str, Any]: ...
    @property
    def padded_rows(self) -> dict[str, int]: ...
    def parts(
        self, name: str, offset: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], NDArray[Any]]]: ...
    def drop_pages(self) -> None: ...


def read_holdfast(path: Path) -> Model:
    checkpoint = open_checkpoint(path, untrusted=True)
    origin = f"Holdfast checkpoint of step {checkpoint.step}, written by {checkpoint.world} ranks"
    return model_of_state(path, checkpoint, origin)


def model_of_state(path: Path, checkpoint: TrainingState, origin: str) -> Model:
    """The model in a state of the run at `path`."""
    config = config_of(path, checkpoint)
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.tensors:
        if name.startswith("model."):
            tensors[name.removeprefix("model.")] = _tensor(checkpoint, name)
            checkpoint.drop_pages()
    if WORD_EMBEDDINGS not in tensors:
        raise HoldfastError(f"{checkpoint.path} has no model.{WORD_EMBEDDINGS}: not a checkpoint of a language model")
    stated = checkpoint.shared.get("true_vocab_size") or checkpoint.padded_rows.get(WORD_EMBEDDINGS)
    sizes = {"true_vocab_size": stated or config.model.vocab_size}
    true_size = read_size(sizes, "true_vocab_size", f"{checkpoint.path}: ") if sizes["true_vocab_size"] else None
    arch = architecture_of(config.model, tensors, true_size)
    check_complete(arch, tensors, str(checkpoint.path))
    special_ids = checkpoint.shared.get("special_ids")
    moments = sum(name.startswith("optimizer.") for name in checkpoint.tensors)
    return Model(
        architecture=arch,
        tensors=tensors,
        origin=origin,
        iteration=checkpoint.step,
        facts={
            "kind": "holdfast",
            "step": checkpoint.step,
            "world": checkpoint.world,
            "optimizer": moments > 0,
        },
        regions=[checkpoint],
        tokenizer=_tokenizer(path, checkpoint, config.data),
        special_ids=valid_ids(special_ids, SPECIAL_IDS, arch.padded_vocab_size)
        if isinstance(special_ids, Mapping)
        else {},
    )


def config_of(path: Path, checkpoint: TrainingState) -> Config:
    """The configuration that the trainer put into the checkpoint; for others the run's config.toml."""
    tables = checkpoint.shared.get("config")
    if isinstance(tables, Mapping):
        known = {
            section: {key: value for key, value in table.items() if value is not None}
            for section, table in tables.items()
            if isinstance(table, Mapping)
        }
        return config_from_tables(known, source=str(checkpoint.path))
    for folder in _run_folders(path, checkpoint):
        if (folder / "config.toml").is_file():
            read_bounded(folder / "config.toml", MAX_CONFIG_BYTES, "configuration")
            return read_config(folder / "config.toml")
    raise HoldfastError(
        f"{checkpoint.path} has no configuration of its model, and there is no config.toml in its run folder"
    )


def _run_folders(path: Path, checkpoint: TrainingState) -> tuple[Path, ...]:
    """Where a file of the run may be: RUN, RUN/checkpoints and RUN/checkpoints/step-... are given as `path`."""
    return path, checkpoint.path.parent, checkpoint.path.parent.parent


def _tokenizer(path: Path, checkpoint: TrainingState, data: DataConfig) -> dict[str, str]:
    """The run's own copy; for a run without one the files that its configuration names."""
    for folder in _run_folders(path, checkpoint):
        for file in (folder / "tokenizer").glob("*"):
            check_size(file)
        if carried := read_folder(folder / "tokenizer"):
            return {**carried.names, "digest": carried.recipe.digest}
    return {key: getattr(data, key) for key in KEYS if getattr(data, key)}


def _tensor(checkpoint: TrainingState, name: str) -> Tensor:
    dtype, shape = checkpoint.tensors[name]
    if dtype not in WIDTHS:
        raise HoldfastError(f"{checkpoint.path}: {name} has type {dtype}, which no weight has")
    if len(shape) > 2:
        raise HoldfastError(f"{checkpoint.path}: {name} has {len(shape)} dimensions, where at most 2 are expected")
    pieces = []
    for slices, part in checkpoint.parts(name, (0,) * len(shape), shape):
        row = slices[0].start if slices else 0
        column = slices[1].start if len(slices) == 2 else 0
        bits = part.view(bits_type(dtype))
        pieces.append(MatrixPiece(row, column, bits if bits.ndim == 2 else bits.reshape(-1, 1)))
    tensor = Tensor(tuple(shape), dtype, tuple(_without_copies(pieces)), dtype)
    if not tensor.is_tiled():
        raise HoldfastError(f"{checkpoint.path}: the pieces of {name} overlap")
    return tensor


def _without_copies(pieces: Sequence[MatrixPiece]) -> list[MatrixPiece]:
    """Each row of a column range once: tensor-parallel ranks all save a norm, both ends of a pipeline the tied embedding."""
    kept: list[MatrixPiece] = []
    covered: dict[tuple[int, int], int] = {}
    for piece in sorted(pieces, key=lambda piece: piece.row):
        columns, end = (piece.column, piece.bits.shape[1]), piece.row + piece.bits.shape[0]
        first = max(piece.row, covered.get(columns, 0))
        if first < end:
            kept.append(MatrixPiece(first, piece.column, piece.bits[first - piece.row :]))
            covered[columns] = end
    return kept


def architecture_of(config: ModelConfig, tensors: Mapping[str, Tensor], true_size: int | None) -> Architecture:
    """The architecture of Holdfast's own models; sizes that the configuration leaves unset come from the tensors."""
    stack, gate = "encoder" if config.model_type == "bert" else "decoder", "_gate" if config.gated else ""
    first = tensors.get(f"{stack}.layers.0.mlp.linear_fc1{gate}.weight")
    positions = tensors.get("embedding.position_embeddings.weight")
    sizes: dict[str, Any] = {
        "num_query_groups": config.num_query_groups or config.num_attention_heads,
        "kv_channels": config.kv_channels or config.hidden_size // config.num_attention_heads,
        "ffn_hidden_size": first.shape[0] if first is not None else config.ffn_hidden_size or 4 * config.hidden_size,
        "max_position_embeddings": positions.shape[0] if positions else config.max_position_embeddings or 2048,
        "vocab_size": true_size,
        "padded_vocab_size": tensors[WORD_EMBEDDINGS].shape[0],
    }
    return Architecture(
        head_activation="gelu_tanh" if config.openai_gelu else "gelu",
        **{**vars(config), **sizes},
    )


def plan_holdfast(model: Model, dtype: str | None, tokenizer: Mapping[str, str], destination: Path) -> WritePlan:
    """A run folder with one checkpoint and the tokenizer: what `holdfast train --load` continues from. Weights are fp32, as in
    training."""
    arch = model.architecture
    true_size = arch.vocabulary()
    config = Config(model=arch.model_config())
    config = replace(config, data=replace(config.data, seq_length=arch.max_position_embeddings))
    carried = folder_contents(tokenizer) if tokenizer else {}
    if tokenizer:
        names: dict[str, Any] = folder_names(carried, destination.absolute() / "tokenizer")
        config = replace(config, data=replace(config.data, **names))
    padded = padded_size(true_size, arch.make_vocab_size_divisible_by)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.tensors.items():
        if name in VOCABULARY_TENSORS:
            tensor = pad_rows(tensor, true_size, padded, model.padding.get(name))
        tensors[f"model.{name}"] = tensor.cast(dtype or "F32")
    step = model.iteration or 0
    folder = f"checkpoints/step-{step:08d}"
    pieces = [TensorSlice(name, t.dtype, t.shape, (0,) * len(t.shape), t.shape) for name, t in tensors.items()]
    layout = lay_out(pieces)
    places = {piece.name: start for piece, start in zip(layout.pieces, layout.starts, strict=True)}
    shard = shard_name(0, 1)

    def finish(root: Path) -> None:
        region = map_file(root / folder / shard)
        manifest = Manifest(
            step=step,
            world=1,
            plan_hash=plan_hash([pieces]),
            tensors={piece.name: (piece.dtype, list(piece.shape)) for piece in pieces},
            files=[describe_shard(layout, 0, 1, checksum_chunks(region.data, threads=2))],
            shared={
                "iteration": step,
                "config": asdict(config),
                "true_vocab_size": true_size,
                "special_ids": model.special_ids,
            },
            per_rank=[{}],
            padded_rows={name: true_size for name in VOCABULARY_TENSORS if name in model.tensors},
            source="conversion",
        )
        write_manifest(root / folder, manifest)

    files = [
        PlannedFile("config.toml", content=config_to_toml(config).encode()),
        *(PlannedFile(f"tokenizer/{name}", content=content) for name, content in carried.items()),
        PlannedFile("checkpoints/latest", content=f"step-{step:08d}\n".encode()),
        PlannedFile(
            f"{folder}/{shard}",
            {piece.name: tensors[piece.name] for piece in layout.pieces},
            layout=(layout.header, places),
        ),
    ]
    notes = (
        ["optimizer state not converted: training starts with fresh moments"] if model.facts.get("optimizer") else []
    )
    if arch.model_type == "bert" and arch.activation != arch.head_activation:
        notes.append(HEAD_NOTE)
    return WritePlan(files, notes, finish)
