"""What is held of a run, in memory and on disk: facts for `snapshots` and `inspect`, and their text. Read-only; no torch."""

import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.checkpoint.manifest import FILE_NAME, read_manifest
from holdfast.checkpoint.reader import Checkpoint
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.ready_slot import OvertakenError, ReadySlot, common_steps, newest_generation
from holdfast.snapshot.memory.run_memory import RunMemory, keeper_alive, opened_arenas
from holdfast.snapshot.memory.slot import EMPTY, READY, STATES, DamagedError
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import read_journal
from holdfast.system.leases import lease_seconds, newest_lease
from holdfast.system.progress import count_of
from holdfast.system.run_claim import FOLDER as CLAIM_FOLDER


def arena_facts(arena: Arena, verify: bool) -> dict[str, Any]:
    """One rank's memory, slot by slot. `verify` compares every byte now; otherwise the keeper's last check is reported."""
    slots = []
    for index, header in enumerate(arena.headers()):
        if header.state == EMPTY:
            continue
        verified: bool | None = arena.verified(index) == header.sequence or None
        trouble = None
        if verify and header.state == READY:
            try:
                ReadySlot(arena, index, header).verify()
                verified = True
            except OvertakenError:
                header, verified = arena.headers()[index], None
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


def run_facts(run_memory: RunMemory, verify: bool = False, verify_disk_bytes: float = 0) -> dict[str, Any]:
    """Everything that this host holds of a run."""
    with (
        opened_arenas(run_memory.arenas(), run_memory.key) as own,
        opened_arenas(run_memory.peer_arenas(), run_memory.key) as peers,
    ):
        held = {
            "common_steps": common_steps(newest_generation(own)),
            "arenas": [arena_facts(arena, verify) for arena in own],
            "peer_copies": [arena_facts(arena, verify) for arena in peers],
        }
    return disk_only_facts(run_memory.folder, verify_disk_bytes) | {
        "run": run_memory.name,
        "memory": str(run_memory.path),
        "bytes": run_memory.memory_bytes(),
        "keeper": keeper_alive(run_memory),
        "ranks": [
            {
                "rank": rank,
                "alive": page.owner_alive(),
                "step": page["step"],
                "stands": page.phase_name,
                "skipped": page["skipped"],
            }
            for rank, page in run_memory.pages().items()
        ],
        **held,
    }


def disk_only_facts(folder: Path, verify_disk_bytes: float = 0) -> dict[str, Any]:
    """The same keys for a run of which this host holds nothing in memory."""
    return {
        "run": folder.resolve().name,
        "folder": str(folder.resolve()),
        "memory": None,
        "bytes": 0,
        "keeper": False,
        "claimed_by": live_claims(folder),
        "common_steps": [],
        "ranks": [],
        "arenas": [],
        "peer_copies": [],
        "checkpoints": disk_facts(folder, verify_disk_bytes),
    }


def live_claims(folder: Path) -> list[str]:
    """The processes that hold a claim of the run, on any host. A process of another host counts as alive if its lease file was
    touched within the lease time."""
    found = []
    for node in sorted(folder.glob(f"{CLAIM_FOLDER}/node-*")):
        lease = newest_lease(node) if node.is_dir() else None
        if lease is None or lease.has_ended():
            continue
        local = lease.holder is not None and lease.holder.is_local()
        if local or time.time() - lease.file_in(node).stat().st_mtime < lease_seconds():
            found.append(lease.describe())
    return found


def disk_facts(folder: Path, verify_bytes: float = 0) -> list[dict[str, Any]]:
    """The checkpoints of a run folder, newest first. The sizes of all files are checked; checksums, newest checkpoint first,
    of up to `verify_bytes` bytes. `verified` is None if the checksums were not compared."""
    found = []
    for step, path in reversed(checkpoints_in(folder)):
        entry: dict[str, Any] = {"step": step, "path": str(path), "bytes": 0, "world": 0, "source": None}
        entry |= {"trouble": None, "verified": None}
        try:
            if not (path / FILE_NAME).is_file():
                raise HoldfastError(f"{path} is not a complete checkpoint: it has no {FILE_NAME}")
            manifest = read_manifest(path)
            size = sum(file.bytes for file in manifest.files)
            entry |= {"bytes": size, "world": manifest.world, "source": manifest.source}
            sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
            wrong = [file.name for file in manifest.files if sizes.get(file.name) != file.bytes]
            if wrong:
                raise HoldfastError(f"missing or of a wrong size: {', '.join(wrong)}")
            if size <= verify_bytes:
                verify_bytes -= size
                Checkpoint(path, manifest).verify()
                entry["verified"] = True
        except (HoldfastError, OSError) as error:
            entry |= {"trouble": str(error), "verified": False}
        found.append(entry)
    return found


def is_run_folder(path: Path) -> bool:
    """Whether a training run wrote to this folder. A converted checkpoint has a config.toml and checkpoints, but no record."""
    if (path / "events.jsonl").exists() or (path / "metrics.jsonl").exists():
        return True
    return (path / "config.toml").is_file() and not (path / "checkpoints").exists()


def run_folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and is_run_folder(entry))
    except OSError:
        return []


def run_lines(facts: dict[str, Any]) -> list[str]:
    """The facts as text of at most 80 columns, paths aside."""
    lines = [f"run {facts['run']} in {facts['folder']}", *memory_lines(facts), *disk_lines(facts)]
    return [*lines, *advice_lines([resume_advice(facts)])]


def memory_lines(facts: dict[str, Any]) -> list[str]:
    if facts["memory"] is None:
        return ["memory: this host holds nothing of this run"]
    steps = facts["common_steps"]
    whole = f"step {steps[0]:,} is whole on all ranks here" if steps else "no step is whole on all ranks here"
    lines = [
        f"memory: {size_text(facts['bytes'])}, {whole}, keeper {'alive' if facts['keeper'] else 'not running'}",
        f"  {facts['memory']}",
    ]
    rows = [
        [f"{rank['rank']}", f"{rank['step']:,}", rank["stands"] if rank["alive"] else "gone", f"{rank['skipped']:,}"]
        for rank in facts["ranks"]
    ]
    lines += table(["rank", "step", "state", "skipped snapshots"], rows)
    rows = []
    for origin, arenas in (("own", facts["arenas"]), ("peer copy", facts["peer_copies"])):
        for arena in arenas:
            rows += [[f"{arena['rank']}", origin, *slot_cells(slot)] for slot in arena["slots"]]
    return lines + table(["rank", "origin", "snapshot", "state", "verified", "age"], rows)


def slot_cells(slot: dict[str, Any]) -> list[str]:
    """A slot as cells of a table: step, state, verified, age."""
    verified = {True: "yes", False: "DAMAGED", None: "not yet"}[slot["verified"]] if slot["state"] == "ready" else "-"
    state = "being copied" if slot["state"] == "writing" else slot["state"]
    return [
        f"step {slot['step']:,}",
        "going to disk" if slot["pinned"] else state,
        verified,
        f"{slot['age_seconds']:,.0f} s",
    ]


def disk_lines(facts: dict[str, Any]) -> list[str]:
    entries = facts["checkpoints"]
    if not entries:
        return ["disk: no checkpoint"]
    rows, troubles = [], []
    for entry in entries:
        health = {True: "checksums match", False: "DAMAGED", None: "complete, checksums not compared"}[
            entry["verified"]
        ]
        size = size_text(entry["bytes"]) if entry["bytes"] else "-"
        rows.append([f"step {entry['step']:,}", size, f"{entry['world'] or '-'}", health])
        troubles += [f"  step {entry['step']:,}: {entry['trouble']}"] if entry["trouble"] else []
    return [
        f"disk: {count_of(len(entries), 'checkpoint')}",
        *table(["checkpoint", "size", "ranks", "health"], rows),
        *troubles,
    ]


def resume_advice(facts: dict[str, Any]) -> tuple[str, str]:
    """What to do next with a run: a sentence, and the command ("" if only the user knows it)."""
    folder = Path(facts["folder"])
    if facts["claimed_by"] or any(rank["alive"] for rank in facts["ranks"]):
        return "the run is training; to save it and end it", f"holdfast persist {quote(str(folder))} --stop"
    usable = [entry["step"] for entry in facts["checkpoints"] if not entry["trouble"]]
    ends = [e for e in read_events(folder) if e.get("event") in ("started", "resumed", "failure", "finished")]
    if usable and ends and ends[-1].get("event") == "finished" and not ends[-1].get("stopped"):
        return "the run is finished; to generate text", f'holdfast generate {quote(str(folder))} --prompt "..."'
    held = facts["common_steps"]
    where = "from step 0, because no usable state is held"
    if held and held[0] >= max(usable, default=0):
        where = f"from step {held[0]:,} in memory"
    elif usable:
        where = f"from step {max(usable):,} on disk"
    if (folder / "config.toml").is_file():
        return f"to continue {where}", f"holdfast train {quote(str(folder / 'config.toml'))}"
    return f"start the same training script again; it continues {where}", ""


def advice_lines(advice: Sequence[tuple[str, str]]) -> list[str]:
    lines = ["what to do next"]
    for sentence, command in advice:
        lines += [f"  {sentence}:", f"    {command}"] if command else [f"  {sentence}"]
    return lines


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The records of events.jsonl; none if it is not a regular file."""
    path = folder / "events.jsonl"
    return list(read_journal(path)) if path.is_file() else []


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns with two spaces between; numbers aligned to the right. No lines if there are no rows."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    right = [
        all(row[column].replace(",", "").isdigit() or row[column] == "-" for row in rows)
        for column in range(len(headings))
    ]
    lines = []
    for row in [headings, *rows]:
        cells = (
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, right, strict=True)
        )
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def size_text(size: float) -> str:
    """12 B, 3.4 KB, 5.6 MB: powers of 1000."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= limit:
            return f"{size / limit:.1f} {unit}"
    return f"{size:.0f} B"
