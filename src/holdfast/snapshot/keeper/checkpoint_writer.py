"""Writes the slots of one step from memory to a checkpoint folder on disk. Runs in the keeper; no torch.

A slot's payload is the shard file already, so this is a checksummed write. The invariants: bytes are compared with the row sums
after they were read for writing, and the slot's header is read again when its file is complete, so a snapshot that was
overwritten or damaged during the write never gets a final name; when anything fails, the temporary folder is removed and memory
is unchanged.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import (
    new_temporary,
    publish_step,
    remove_dead_temporaries,
    remove_earlier_starts,
    shared_temporary,
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
    read_manifest,
    shard_name,
    write_manifest,
)
from holdfast.checkpoint.retention import retain
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.ready_slot import OvertakenError, ReadySlot, find_ready
from holdfast.snapshot.memory.run_memory import read_json, write_json
from holdfast.snapshot.memory.slot import DamagedError
from holdfast.system.atomic_files import explain_os_error, fsync
from holdfast.system.descriptors import write_all
from holdfast.system.errors import HoldfastError

ENTRY_SUFFIX, HEARTBEAT_SUFFIX = ".entry.json", ".heartbeat.json"
HEARTBEAT_SECONDS = 1.0
LONGEST_WRITE_SECONDS = 4 * 3600.0
"""the longest that keepers wait for each other while all of them write heartbeats"""


def all_passed(arenas: list[Arena], step: int) -> bool:
    """Whether every rank holds a newer step: a step that is not held then will never be."""
    return bool(arenas) and all(max(arena.ready_steps(), default=-1) > step for arena in arenas)


def write_checkpoint(
    arenas: Sequence[Arena],
    step: int,
    checkpoints: Path,
    retention: tuple[int | None, int | None] = (None, None),
    wait_seconds: float = 15.0,
    solo: bool = False,
    kept: tuple[int | None, Collection[int]] = (None, ()),
) -> Path:
    """Writes the step that these arenas hold as a checkpoint. The keepers of several nodes write into one temporary folder.

    The keeper of rank 0 waits for the others and gives the folder its name. Without it, a node that holds the whole state writes
    by itself. A keeper that writes a heartbeat is waited for however long its disk takes; `wait_seconds` is the limit for the
    others. `solo`: no other node takes part, so a node that holds the whole state does not wait at all. `kept`: for retention,
    the step that the run resumed from, and the steps that this process wrote.
    """
    held = {arena.rank: found for arena in arenas if (found := find_ready(arena, step)) is not None}
    if len(held) != len(arenas) or not held:
        raise OvertakenError(f"step {step} is no longer in memory")
    facts = next(iter(held.values())).small
    final = checkpoints / step_folder_name(step)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(checkpoints)
        if 0 in held:
            remove_earlier_starts(checkpoints, facts["token"])
        if len(held) < facts["world"] and is_published(final, facts["token"]):
            pass  # another node wrote it by itself
        elif len(held) == facts["world"]:
            _write_solo(held, facts["writers"], new_temporary(checkpoints, step), final)
        elif solo and (complete := _complete_set(facts, held)):
            _write_solo(held, complete, new_temporary(checkpoints, step), final)
        elif 0 in held:
            _lead(held, facts, shared_temporary(checkpoints, step, facts["token"]), final, wait_seconds)
        else:
            _follow(held, facts, shared_temporary(checkpoints, step, facts["token"]), final, wait_seconds)
        if 0 in held:
            retain_after(step, checkpoints, retention, kept)
    except OSError as error:
        raise explain_os_error(error, final) from error
    return final


def retain_after(
    step: int,
    checkpoints: Path,
    retention: tuple[int | None, int | None],
    kept: tuple[int | None, Collection[int]],
) -> None:
    """Applies retention after this step. `kept`: the step resumed from, and steps known to be whole."""
    resumed, written = kept
    protect = [step] if resumed is None else [step, resumed]
    retain(checkpoints, *retention, protect=protect, written=[step, *written])


def _complete_set(facts: dict[str, Any], held: Mapping[int, ReadySlot]) -> list[int] | None:
    """Ranks of this node that hold the whole state among them."""
    return next((ranks for ranks in facts["complete"] if set(ranks) <= set(held)), None)


def _write_solo(held: Mapping[int, ReadySlot], writers: Sequence[int], temporary: Path, final: Path) -> None:
    _check_free_space(final.parent, sum(held[rank].arena.sizes.payload for rank in writers))
    try:
        temporary.mkdir()
        for rank, found in held.items():
            _write_entry(temporary, _write_part(temporary, found, rank in writers))
        _complete(temporary, final, _read_entries(temporary))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _lead(
    held: Mapping[int, ReadySlot], facts: dict[str, Any], temporary: Path, final: Path, wait_seconds: float
) -> None:
    """The keeper of rank 0: writes its part, waits for the other nodes, and publishes. Parts that hold no shard may be absent."""
    writers = facts["writers"]
    _check_free_space(final.parent, sum(held[rank].arena.sizes.payload for rank in writers if rank in held))
    try:
        temporary.mkdir(exist_ok=True)
        with _Heartbeat(temporary, 0):
            for rank, found in held.items():
                _write_entry(temporary, _write_part(temporary, found, rank in writers))
            others = _PeerProgress(temporary, wait_seconds, own_rank=0)
            while len(list(temporary.glob("*" + ENTRY_SUFFIX))) < facts["world"] and not others.has_stalled():
                time.sleep(0.05)
        entries = _read_entries(temporary)
        if not set(writers) <= {entry["rank"] for entry in entries}:
            raise HoldfastError(
                f"{len(entries)} of {facts['world']} ranks wrote their part within {wait_seconds:.0f} s"
            )
        _complete(temporary, final, entries)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _follow(
    held: Mapping[int, ReadySlot], facts: dict[str, Any], temporary: Path, final: Path, wait_seconds: float
) -> None:
    """The keeper of another node: writes its part, and waits until the keeper of rank 0 has published."""
    temporary.mkdir(exist_ok=True)
    own = min(held)
    with _Heartbeat(temporary, own):
        entries = [_write_part(temporary, found, rank in facts["writers"]) for rank, found in held.items()]
    # After the last heartbeat: the folder may get its final name as soon as the last entry is there.
    for entry in entries:
        _write_entry(temporary, entry)
    others = _PeerProgress(temporary, 2 * wait_seconds, own_rank=own)
    while not is_published(final, facts["token"]):
        if _was_removed(temporary, own) and not is_published(final, facts["token"]):
            raise HoldfastError(f"the keeper of rank 0 could not complete {final}")
        if others.has_stalled():
            shutil.rmtree(temporary, ignore_errors=True)
            complete = _complete_set(facts, held)
            if complete is None:
                raise HoldfastError(f"the keeper of rank 0 did not complete {final} within {2 * wait_seconds:.0f} s")
            _write_solo(held, complete, new_temporary(final.parent, held[complete[0]].header.step), final)
        time.sleep(0.05)
    shutil.rmtree(temporary, ignore_errors=True)  # left if this node wrote its part after the publication


def _was_removed(temporary: Path, rank: int) -> bool:
    """Whether the part of this rank is gone: the keeper of rank 0 failed and removed it, or has published the folder."""
    return not _entry_path(temporary, rank).exists() and not (temporary / FILE_NAME).exists()


class _Heartbeat:
    """While a keeper writes into a shared folder: a file there, named by its first rank, that changes every second."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank:05d}{HEARTBEAT_SUFFIX}"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # a keeper with a full disk is not waited for
                write_json(self._path, time.time())


class _PeerProgress:
    """Whether the other keepers have neither written a heartbeat nor finished a part in the folder for some seconds."""

    def __init__(self, folder: Path, seconds: float, own_rank: int) -> None:
        self._folder, self._seconds = folder, seconds
        self._own = f"rank-{own_rank:05d}{HEARTBEAT_SUFFIX}"
        self._seen: dict[str, Any] = {}
        self._since = self._began = time.monotonic()

    def has_stalled(self) -> bool:
        seen = {
            path.name: read_json(path) for path in self._folder.glob("*" + HEARTBEAT_SUFFIX) if path.name != self._own
        }
        seen |= {path.name: None for path in self._folder.glob("*" + ENTRY_SUFFIX)}
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since > self._seconds or now - self._began > LONGEST_WRITE_SECONDS


def is_published(final: Path, token: str) -> bool:
    """Whether the checkpoint exists and comes from this start of the run; an earlier start may have left one of that step."""
    try:
        return read_manifest(final).shared.get("start") == token
    except (HoldfastError, OSError):
        return False


def start_token(arenas: Sequence[Arena], step: int) -> str | None:
    """The start of the run that this step in memory comes from."""
    for arena in arenas:
        if (held := find_ready(arena, step)) is not None:
            with contextlib.suppress(DamagedError, OvertakenError):
                return str(held.small["token"])
    return None


def _complete(temporary: Path, final: Path, entries: list[dict[str, Any]]) -> None:
    """Writes the manifest and publishes. A failed attempt may have removed a shard whose entry was written afterwards."""
    manifest = _manifest(entries)
    for file in manifest.files:
        shard = temporary / file.name
        if not shard.exists() or shard.stat().st_size != file.bytes:
            raise HoldfastError(f"the shard of rank {file.rank} is no longer in {temporary}")
    write_manifest(temporary, manifest)
    fsync(temporary / FILE_NAME)
    named = {FILE_NAME, *(file.name for file in manifest.files)}
    for path in temporary.iterdir():  # entries, heartbeats, and temporary files of keepers that were killed
        if path.name not in named:
            path.unlink(missing_ok=True)
    publish_step(temporary, final)


def _write_part(folder: Path, held: ReadySlot, writes: bool) -> dict[str, Any]:
    """Writes one rank's shard; returns the rank's entry, from which the manifest is made."""
    file = asdict(_write_shard(folder, held)) if writes else None
    entry = {
        "rank": held.arena.rank,
        "step": held.header.step,
        "plan": held.arena.plan,
        "file": file,
        "tensors": {p.name: (p.dtype, list(p.global_shape)) for p in held.slot.layout(held.header).pieces},
        "small": held.small,
    }
    held.check_unchanged()
    return entry


def _write_entry(folder: Path, entry: dict[str, Any]) -> None:
    write_json(_entry_path(folder, entry["rank"]), entry)


def _entry_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}{ENTRY_SUFFIX}"


def _read_entries(folder: Path) -> list[dict[str, Any]]:
    found = (read_json(path) for path in sorted(folder.glob("*" + ENTRY_SUFFIX)))
    return [entry for entry in found if entry is not None]


def _write_shard(folder: Path, held: ReadySlot) -> ShardFile:
    slot, layout = held.slot, held.slot.layout(held.header)
    path = folder / shard_name(held.arena.rank, held.arena.world)
    chunks = []
    with open(path, "wb", buffering=0) as file:
        for begin, end in chunk_ranges(layout.size):
            part = slot.payload[begin:end].data
            chunks.append(chunk_checksum(part))
            write_all(file.fileno(), part)
        os.fsync(file.fileno())
    # After the checksums: so the bytes that they describe are those that were copied.
    held.verify()
    return describe_shard(layout, held.arena.rank, held.arena.world, chunks)


def _manifest(entries: list[dict[str, Any]]) -> Manifest:
    tensors: dict[str, Any] = {}
    for entry in entries:
        tensors.update(entry["tensors"])
    smalls = {entry["rank"]: entry["small"] for entry in entries}
    facts = smalls[min(smalls)]
    return Manifest(
        step=entries[0]["step"],
        world=facts["world"],
        plan_hash=entries[0]["plan"],
        tensors=dict(sorted(tensors.items())),
        files=[ShardFile(**entry["file"]) for entry in entries if entry["file"]],
        layout=facts["layout"],
        shared={**facts["shared"], "extra": facts["extra"], "start": facts["token"]},
        per_rank=[_per_rank(smalls[r], facts["extra"]) if r in smalls else {} for r in range(facts["world"])],
        optimizer_settings=merge_settings([smalls[rank]["optimizer"] for rank in sorted(smalls)]),
        padded_rows=facts["padded_rows"],
        source="memory",
    )


def _per_rank(small: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """What a rank has of its own; extra state that is equal on all ranks is stored once."""
    own = {} if small["extra"] == extra else {"extra": small["extra"]}
    return {"random": small["random"], **own}


def _check_free_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HoldfastError(f"no room left on the disk of {folder}: {needed:,} bytes are needed, {free:,} are free")
