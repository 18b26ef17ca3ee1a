"""Writing a checkpoint: every rank its shard, rank 0 the manifest, then the name, then `latest`.

The invariant: when anything fails on any rank, no step folder appears, what was there stays, and all ranks raise the same error.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.collective import agree, gather, rank_and_world
from holdfast.checkpoint.folder import (
    new_temporary,
    publish_step,
    remove_dead_temporaries,
    step_folder_name,
)
from holdfast.checkpoint.layout import ShardLayout, TensorSlice, lay_out
from holdfast.checkpoint.manifest import (
    CHUNK,
    Manifest,
    ShardFile,
    chunk_checksum,
    describe_shard,
    merge_settings,
    shard_name,
    write_manifest,
)
from holdfast.checkpoint.plan import LocalTensor, divide, plan_hash, ranks_to_persist, tensors_of
from holdfast.checkpoint.retention import retain
from holdfast.checkpoint.state import Item, State
from holdfast.system.atomic_files import explain_os_error, fsync


def save(
    folder: Path | str,
    step: int,
    state: State,
    keep_last: int | None = None,
    keep_every: int | None = None,
    layout: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the state as `folder/step-NNNNNNNN`; collective. `layout` (how the run was cut) is kept for people to read."""
    folder = Path(folder)
    rank, world = rank_and_world()
    items: list[Item] = []
    token = None
    trouble: Exception | None = None
    try:
        items = state.items()
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            remove_dead_temporaries(folder)
            token = new_temporary(folder, step).name
    except OSError as error:
        trouble = explain_os_error(error, folder / step_folder_name(step))
    except Exception as error:
        trouble = error
    agree(trouble)
    told = gather({"held": encode_held(items), "replica_set": state.replica_set, "token": token})
    kept = divide([decode_held(entry["held"]) for entry in told], [entry["replica_set"] for entry in told])
    writers = ranks_to_persist(kept)
    temporary = folder / told[0]["token"]
    final = folder / step_folder_name(step)
    entry = None
    try:
        if rank in writers:
            entry = _write_shard(temporary, rank, world, lay_out(kept[rank]), items)
    except OSError as error:
        trouble = explain_os_error(error, final)
    except Exception as error:
        trouble = error
    try:
        agree(trouble)
        mine = {
            "file": asdict(entry) if entry else None,
            "per_rank": state.per_rank,
            "optimizer": state.optimizer_settings(),
        }
        everyone = gather(mine)
        _finish(temporary, final, step, state, kept, everyone, layout or {}, (keep_last, keep_every))
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _finish(
    temporary: Path,
    final: Path,
    step: int,
    state: State,
    kept: Sequence[Sequence[TensorSlice]],
    everyone: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    retention: tuple[int | None, int | None],
) -> None:
    trouble: Exception | None = None
    if rank_and_world()[0] == 0:
        manifest = Manifest(
            step=step,
            world=len(kept),
            plan_hash=plan_hash(kept),
            tensors={name: (dtype, list(shape)) for name, (dtype, shape) in sorted(tensors_of(kept).items())},
            files=[ShardFile(**told["file"]) for told in everyone if told["file"]],
            layout=dict(layout),
            shared=state.shared,
            per_rank=[told["per_rank"] for told in everyone],
            optimizer_settings=merge_settings([told["optimizer"] for told in everyone]),
            padded_rows=state.padded_rows,
        )
        try:
            write_manifest(temporary, manifest)
            fsync(temporary / "MANIFEST.json")
            publish_step(temporary, final)
            retain(final.parent, *retention, protect=[step], written=[step])
        except OSError as error:
            trouble = explain_os_error(error, final)
        except Exception as error:  # the other ranks wait in `agree`, whatever it is
            trouble = error
    agree(trouble)


def _write_shard(folder: Path, rank: int, world: int, layout: ShardLayout, items: Sequence[Item]) -> ShardFile:
    folder.mkdir(exist_ok=True)
    path = folder / shard_name(rank, world)
    locals_ = {item.name: item for item in items}
    with open(path, "wb") as file:
        writer = _ChunkedWriter(file)
        writer.write(layout.header)
        for piece in layout.pieces:
            source = rows_of(locals_[piece.name], piece)
            writer.write(source.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        chunks = writer.finish()
        file.flush()
    fsync(path)
    return describe_shard(layout, rank, world, chunks)


def rows_of(item: Item, piece: TensorSlice) -> torch.Tensor:
    """The rows of this rank's tensor that a piece of it is made of."""
    if not piece.shape:
        return item.local
    first = piece.offset[0] - item.box.offset[0]
    return item.local[first : first + piece.shape[0]]


class _ChunkedWriter:
    """Writes a stream and takes the checksum of each chunk of it as it passes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._waiting = bytearray()
        self._chunks: list[str] = []

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        view = memoryview(content)
        while len(self._waiting) + len(view) >= CHUNK:
            taken = CHUNK - len(self._waiting)
            self._waiting += view[:taken]
            self._chunks.append(chunk_checksum(self._waiting))
            self._waiting = bytearray()
            view = view[taken:]
        self._waiting += view

    def finish(self) -> list[str]:
        return self._chunks + ([chunk_checksum(self._waiting)] if self._waiting else [])


def encode_held(items: Sequence[Item]) -> list[Any]:
    return [
        [item.name, item.box.dtype, item.box.global_shape, item.box.offset, item.box.shape, item.divisible]
        for item in items
    ]


def decode_held(told: Sequence[Sequence[Any]]) -> list[LocalTensor]:
    return [
        LocalTensor(TensorSlice(name, dtype, tuple(whole), tuple(offset), tuple(shape)), divisible)
        for name, dtype, whole, offset, shape, divisible in told
    ]
