"""What is held of a run, in memory and on disk: facts, for `snapshots`, `inspect` and whoever asks. No torch; nothing is
changed."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.checkpoint.manifest import read_manifest
from holdfast.errors import HoldfastError
from holdfast.snapshot.arena import EMPTY, READY, SLOTS, STATES, Arena, DamagedError
from holdfast.snapshot.persisting import Held, OvertakenError, common_steps, newest_generation
from holdfast.snapshot.place import Place, keeper_alive, open_arenas


def arena_facts(arena: Arena, verify: bool) -> dict[str, Any]:
    """One rank's memory, slot by slot. `verify` compares every byte with its row sum now; else the keeper's last word counts."""
    slots = []
    for index in range(SLOTS):
        header = arena.slot(index).header()
        if header.state == EMPTY:
            continue
        verified: bool | None = arena.verified(index) == header.sequence or None
        trouble = None
        if verify and header.state == READY:
            try:
                Held(arena, index, header).verify()
                verified = True
            except OvertakenError:
                header, verified = arena.slot(index).header(), None
            except DamagedError as error:
                verified, trouble = False, str(error)
        slots.append(
            {
                "slot": index,
                "state": STATES[header.state],
                "step": header.step,
                "age_seconds": round(time.time() - header.time, 1),
                "verified": verified,
                "pinned": arena.pinned(index),
                "trouble": trouble,
            }
        )
    return {
        "file": str(arena.path),
        "rank": arena.rank,
        "world": arena.world,
        "plan": arena.plan,
        "bytes_per_slot": arena.sizes.stride,
        "bytes": arena.path.stat().st_blocks * 512,
        "slots": slots,
    }


def run_facts(place: Place, verify: bool = False) -> dict[str, Any]:
    """Everything that this node holds of a run."""
    own = open_arenas(place.arenas(), place.key)
    peers = open_arenas(place.peer_arenas(), place.key)
    steps = common_steps(newest_generation(own))
    facts = {
        "run": place.name,
        "folder": str(place.folder),
        "memory": str(place.path),
        "bytes": place.memory_bytes(),
        "keeper": keeper_alive(place),
        "common_steps": steps,
        "ranks": [
            {
                "rank": rank,
                "alive": desk.occupied(),
                "step": desk["step"],
                "stands": desk.where,
                "skipped": desk["skipped"],
            }
            for rank, desk in place.desks().items()
        ],
        "arenas": [arena_facts(arena, verify) for arena in own],
        "peer_copies": [arena_facts(arena, verify) for arena in peers],
        "checkpoints": disk_facts(place.folder),
    }
    for arena in own + peers:
        arena.close()
    return facts


def disk_facts(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints of a run folder, newest first; files are looked at by size only."""
    found = []
    for step, path in reversed(checkpoints_in(folder)):
        try:
            manifest = read_manifest(path)
            wrong = [f.name for f in manifest.files if not _has_size(path / f.name, f.bytes)]
            trouble = f"missing or of a wrong size: {', '.join(wrong)}" if wrong else None
            size = sum(file.bytes for file in manifest.files)
            found.append({"step": step, "path": str(path), "bytes": size, "world": manifest.world, "trouble": trouble})
        except HoldfastError as error:
            found.append({"step": step, "path": str(path), "bytes": 0, "world": 0, "trouble": str(error)})
    return found


def run_lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    steps = facts["common_steps"]
    lines = [
        f"run {facts['run']} in {facts['folder']}",
        f"memory: {facts['bytes'] / 1e6:,.1f} MB in {facts['memory']}, keeper {'alive' if facts['keeper'] else 'absent'}, "
        f"newest step whole on all ranks here: {steps[0] if steps else 'none'}",
    ]
    for rank in facts["ranks"]:
        state = rank["stands"] if rank["alive"] else "gone"
        lines.append(f"  rank {rank['rank']}: step {rank['step']}, {state}, {rank['skipped']} snapshots skipped")
    for title, arenas in (("arena", facts["arenas"]), ("copy for a peer", facts["peer_copies"])):
        for arena in arenas:
            lines.append(f"  {title} of rank {arena['rank']} of {arena['world']}: {slot_words(arena['slots'])}")
    lines.append("disk:" if facts["checkpoints"] else "disk: no checkpoint")
    for entry in facts["checkpoints"]:
        whole = f"{entry['bytes'] / 1e6:,.1f} MB, {entry['world']} ranks"
        lines.append(f"  step {entry['step']}: {entry['trouble'] or whole}")
    return lines


def slot_words(slots: Sequence[dict[str, Any]]) -> str:
    words = {True: "verified", False: "DAMAGED", None: "not verified yet"}
    return "; ".join(
        f"step {slot['step']} {slot['state']}"
        + (f", {words[slot['verified']]}" if slot["state"] == "ready" else "")
        + (", being written to disk" if slot["pinned"] else "")
        for slot in slots
    )


def _has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size
