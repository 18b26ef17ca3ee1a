"""`holdfast inspect` of a run's memory, and of a single arena. Run folders are described by holdfast.report.inspection."""

from pathlib import Path
from typing import Any

from holdfast.inspection import DocumentSamples, PathDescription
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.run_memory import RunMemory, read_json
from holdfast.snapshot.report import arena_facts, run_facts, run_lines, slot_cells, table
from holdfast.system.errors import HoldfastError


def recognises(path: Path) -> bool:
    return (path.suffix == ".arena" and path.is_file()) or (path / "run.json").is_file()


def describe(path: Path, samples: DocumentSamples) -> PathDescription:
    if path.suffix == ".arena":
        return _arena(path)
    record = read_json(path / "run.json")
    if not isinstance(record, dict) or not {"name", "folder"} <= set(record):
        raise HoldfastError(f"{path / 'run.json'} is damaged: it does not name the run and its folder")
    return _memory(RunMemory(path, record["name"], Path(record["folder"])))


def _arena(path: Path) -> PathDescription:
    arena = Arena(path)
    facts = arena_facts(arena, verify=True)
    arena.close()
    lines = [f"memory of rank {facts['rank']} of {facts['world']}, {facts['bytes']:,} bytes"]
    lines += table(["snapshot", "state", "verified", "age"], [slot_cells(slot) for slot in facts["slots"]])
    return PathDescription(facts, lines, arena_troubles([facts]))


def _memory(run_memory: RunMemory) -> PathDescription:
    facts = run_facts(run_memory, verify=True)
    return PathDescription(
        facts, run_lines(facts), arena_troubles(facts["arenas"] + facts["peer_copies"]) + disk_troubles(facts)
    )


def arena_troubles(arenas: list[dict[str, Any]]) -> list[str]:
    return [slot["trouble"] for arena in arenas for slot in arena["slots"] if slot["trouble"]]


def disk_troubles(facts: dict[str, Any]) -> list[str]:
    return [f"step {entry['step']}: {entry['trouble']}" for entry in facts["checkpoints"] if entry["trouble"]]
