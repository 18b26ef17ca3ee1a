"""Writing a checkpoint: every rank writes its shard, rank 0 the manifest, then the final name, then `latest`.

The invariant: when anything fails on any rank, no step folder appears, what was there stays, and all ranks raise the same error.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.collective import agreed, gather, rank_and_world
from holdfast.checkpoint.folder import new_temporary, publish_step, remove_dead_temporaries, step_folder_name
from holdfast.checkpoint.layout import ShardLayout, TensorSlice, lay_out
from holdfast.checkpoint.manifest import (
    CHUNK,
    FILE_NAME,
    Manifest,
    ShardFile,
    chunk_checksum,
    describe_shard,
    merge_settings,
    shard_name,
    write_manifest,
)
from holdfast.checkpoint.plan import decode_held, divide, encode_held, plan_hash, ranks_to_persist
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
    """Writes the state as `folder/step-NNNNNNNN`; collective. `layout` (how the run was cut) is for people to read."""
    folder = Path(folder)
    final = folder / step_folder_name(step)
    rank, world = rank_and_world()
    token = None
    with agreed(), _os_errors_explained(final):
        items = state.items()
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            remove_dead_temporaries(folder)
            token = new_temporary(folder, step).name
    held = encode_held(item.held for item in items)
    gathered = gather({"held": held, "replica_set": state.replica_set, "token": token})
    kept = divide([decode_held(entry["held"]) for entry in gathered], [entry["replica_set"] for entry in gathered])
    temporary = folder / gathered[0]["token"]
    entry = None
    try:
        with agreed(), _os_errors_explained(final):
            if rank in ranks_to_persist(kept):
                entry = asdict(_write_shard(temporary, rank, world, lay_out(kept[rank]), items))
        own = {"file": entry, "per_rank": state.per_rank, "optimizer": state.optimizer_settings()}
        everyone = gather(own)
        with agreed(), _os_errors_explained(final):
            if rank == 0:
                write_manifest(temporary, _manifest(step, state, kept, everyone, layout or {}))
                fsync(temporary / FILE_NAME)
                publish_step(temporary, final)
                retain(folder, keep_last, keep_every, protect=[step], written=[step])
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


@contextmanager
def _os_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, path) from error


def _manifest(
    step: int,
    state: State,
    kept: Sequence[Sequence[TensorSlice]],
    everyone: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
) -> Manifest:
    tensors = {piece.name: (piece.dtype, list(piece.global_shape)) for pieces in kept for piece in pieces}
    return Manifest(
        step=step,
        world=len(kept),
        plan_hash=plan_hash(kept),
        tensors=dict(sorted(tensors.items())),
        files=[ShardFile(**rank["file"]) for rank in everyone if rank["file"]],
        layout=dict(layout),
        shared=state.shared,
        per_rank=[rank["per_rank"] for rank in everyone],
        optimizer_settings=merge_settings([rank["optimizer"] for rank in everyone]),
        padded_rows=state.padded_rows,
    )


def _write_shard(folder: Path, rank: int, world: int, layout: ShardLayout, items: Sequence[Item]) -> ShardFile:
    folder.mkdir(exist_ok=True)
    path = folder / shard_name(rank, world)
    by_name = {item.name: item for item in items}
    with open(path, "wb") as file:
        writer = _ChunkedWriter(file)
        writer.write(layout.header)
        for piece in layout.pieces:
            source = rows_of(by_name[piece.name], piece)
            writer.write(source.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        chunks = writer.finish()
        file.flush()
    fsync(path)
    return describe_shard(layout, rank, world, chunks)


def rows_of(item: Item, piece: TensorSlice) -> torch.Tensor:
    """The rows of this rank's tensor that a slice of it consists of."""
    if not piece.shape:
        return item.local
    first = piece.offset[0] - item.box.offset[0]
    return item.local[first : first + piece.shape[0]]


class _ChunkedWriter:
    """Writes a stream and takes the checksum of each chunk of it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._partial = bytearray()
        self._chunks: list[str] = []

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        view = memoryview(content)
        while len(self._partial) + len(view) >= CHUNK:
            taken = CHUNK - len(self._partial)
            self._partial += view[:taken]
            self._chunks.append(chunk_checksum(self._partial))
            self._partial = bytearray()
            view = view[taken:]
        self._partial += view

    def finish(self) -> list[str]:
        return self._chunks + ([chunk_checksum(self._partial)] if self._partial else [])
