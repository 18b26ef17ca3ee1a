"""From memory to disk: the slots of one step become a checkpoint folder. No torch; runs in the keeper or a command.

A slot's payload is the shard file already, so this is a checksummed write. The invariants: bytes are compared with the row sums
after they were read for writing, and the slot is looked at again when its file is complete, so a snapshot that was overwritten
or damaged meanwhile never gets a final name; when anything fails the temporary folder is gone and memory is as it was.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import (
    new_temporary,
    publish_step,
    remove_dead_temporaries,
    retain,
    step_folder_name,
)
from holdfast.checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    ShardFile,
    chunk_checksum,
    chunk_ranges,
    describe_shard,
    merge_settings,
    shard_name,
    write_manifest,
)
from holdfast.errors import HoldfastError
from holdfast.publish import explain_os_error, fsync
from holdfast.snapshot.arena import READY, Arena, DamagedError, Slot, SlotHeader
from holdfast.snapshot.place import read_json, write_json

ENTRY_SUFFIX = ".entry.json"


@dataclass(frozen=True)
class Held:
    """A READY slot: where, and what it says."""

    arena: Arena
    index: int
    header: SlotHeader

    @property
    def slot(self) -> Slot:
        return self.arena.slot(self.index)

    def still_there(self) -> bool:
        return self.slot.header() == self.header


def held_at(arena: Arena, step: int) -> Held | None:
    best = None
    for index, header in enumerate(arena.headers()):
        younger = best is None or header.sequence > best.header.sequence
        if header.state == READY and header.step == step and younger:
            best = Held(arena, index, header)
    return best


def newest_generation(arenas: Sequence[Arena]) -> list[Arena]:
    """The arenas of the youngest plan that has a common step; of the youngest plan where none has."""
    generations = sorted({arena.generation for arena in arenas}, reverse=True)
    for generation in generations:
        group = [arena for arena in arenas if arena.generation == generation]
        if common_steps(group):
            return group
    return [arena for arena in arenas if generations and arena.generation == generations[0]]


def common_steps(arenas: Sequence[Arena]) -> list[int]:
    """The steps that every rank of this node has READY, newest first."""
    if not arenas:
        return []
    steps = set.intersection(*(arena.ready_steps() for arena in arenas))
    whole = []
    for step in sorted(steps, reverse=True):
        held = held_at(arenas[0], step)
        if held is None:
            continue
        try:
            here = held.slot.small_state(held.header)["here"]
        except DamagedError:
            continue
        if {arena.rank for arena in arenas} >= set(here):
            whole.append(step)
    return whole


def write_checkpoint(
    arenas: Sequence[Arena],
    step: int,
    checkpoints: Path,
    retention: tuple[int | None, int | None] = (None, None),
    patience: float = 15.0,
) -> Path:
    """Writes the step that these arenas hold as a checkpoint. Arenas of other nodes are waited for in the shared folder."""
    held = [found for arena in arenas if (found := held_at(arena, step)) is not None]
    if len(held) != len(arenas) or not held:
        raise HoldfastError(f"step {step} is no longer in memory")
    states = {found.arena.rank: found.slot.small_state(found.header) for found in held}
    facts = next(iter(states.values()))
    writers: list[int] = facts["writers"]
    final = checkpoints / step_folder_name(step)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(checkpoints)
        alone = set(writers) <= set(states)
        temporary = new_temporary(checkpoints, step) if alone else _shared_temporary(checkpoints, step, facts["token"])
        _check_room(checkpoints, sum(found.arena.sizes.payload for found in held if found.arena.rank in writers))
    except OSError as error:
        raise explain_os_error(error, final) from error
    try:
        temporary.mkdir(exist_ok=not alone)
        for found in held:
            _write_entry(temporary, found, states[found.arena.rank], found.arena.rank in writers)
        if 0 in states or alone:
            entries = _await_entries(temporary, facts["world"] if not alone else len(held), patience)
            write_manifest(temporary, _manifest(step, entries, facts, held[0]))
            fsync(temporary / FILE_NAME)
            for entry in temporary.glob("*" + ENTRY_SUFFIX):
                entry.unlink()
            publish_step(temporary, final)
            retain(checkpoints, *retention)
        else:
            _await_name(final, patience)
    except BaseException as error:
        if alone or 0 in states:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise explain_os_error(error, final) from error
        raise
    return final


def _write_entry(folder: Path, held: Held, small: dict[str, Any], writes: bool) -> None:
    """One rank's shard and what the manifest will say about it."""
    file = None
    if writes:
        file = asdict(_write_shard(folder, held))
    if not held.still_there():
        raise HoldfastError(
            f"step {held.header.step} of rank {held.arena.rank} was overwritten while it was written to disk"
        )
    record = {"rank": held.arena.rank, "file": file, "tensors": _tensors(held), "small": small}
    write_json(folder / f"rank-{held.arena.rank:05d}{ENTRY_SUFFIX}", record)


def _write_shard(folder: Path, held: Held) -> ShardFile:
    slot, layout = held.slot, held.slot.layout(held.header)
    path = folder / shard_name(held.arena.rank, held.arena.world)
    chunks = []
    with open(path, "wb", buffering=0) as file:
        for begin, end in chunk_ranges(layout.size):
            part = slot.payload[begin:end].data
            chunks.append(chunk_checksum(part))
            written = 0
            while written < len(part):
                written += file.write(part[written:])
        os.fsync(file.fileno())
    # after the checksums: what they describe is then known to be what was copied
    slot.verify(held.header)
    return describe_shard(layout, held.arena.rank, held.arena.world, chunks)


def _tensors(held: Held) -> dict[str, Any]:
    return {piece.name: (piece.dtype, list(piece.global_shape)) for piece in held.slot.layout(held.header).pieces}


def _manifest(step: int, entries: list[dict[str, Any]], facts: dict[str, Any], held: Held) -> Manifest:
    tensors: dict[str, Any] = {}
    for entry in entries:
        tensors.update(entry["tensors"])
    smalls = {entry["rank"]: entry["small"] for entry in entries}
    extra = smalls[min(smalls)]["extra"]
    return Manifest(
        step=step,
        world=facts["world"],
        plan_hash=held.arena.plan,
        tensors=dict(sorted(tensors.items())),
        files=[ShardFile(**entry["file"]) for entry in entries if entry["file"]],
        layout=facts["layout"],
        shared={**facts["shared"], "extra": extra},
        per_rank=[_per_rank(smalls[rank], extra) if rank in smalls else {} for rank in range(facts["world"])],
        optimizer_settings=merge_settings([smalls[rank]["optimizer"] for rank in sorted(smalls)]),
        padded_rows=facts["padded_rows"],
        source="memory",
    )


def _per_rank(small: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """What a rank has of its own; extra state that is the same everywhere is told once."""
    own = {} if small["extra"] == extra else {"extra": small["extra"]}
    return {"random": small["random"], **own}


def _shared_temporary(checkpoints: Path, step: int, token: str) -> Path:
    """The folder in which the keepers of several nodes meet; only the one with rank 0 gives it its final name."""
    return checkpoints / f".{step_folder_name(step)}.{token}.tmp"


def _await_entries(folder: Path, count: int, patience: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + patience
    while True:
        found = sorted(folder.glob("*" + ENTRY_SUFFIX))
        if len(found) >= count:
            return [read_json(path) for path in found]
        if time.monotonic() > deadline:
            raise HoldfastError(
                f"{len(found)} of {count} ranks have written their part to {folder} within {patience:.0f} s"
            )
        time.sleep(0.05)


def _await_name(final: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not (final / FILE_NAME).exists():
        if time.monotonic() > deadline:
            raise HoldfastError(f"the keeper of rank 0 did not complete {final} within {patience:.0f} s")
        time.sleep(0.05)


def _check_room(folder: Path, needed: int) -> None:
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    if free < needed:
        raise HoldfastError(f"no room left on the disk of {folder}: {needed:,} bytes are needed, {free:,} are free")
