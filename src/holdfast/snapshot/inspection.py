"""`holdfast inspect` of a run folder, of a run's memory, and of a single arena."""

from pathlib import Path
from typing import Any

from holdfast.inspection import Description, Reader
from holdfast.journal import read_journal
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.place import Place, places, read_json
from holdfast.snapshot.report import arena_facts, disk_facts, run_facts, run_lines, slot_words


def recognises(path: Path) -> bool:
    return path.suffix == ".arena" or (path / "run.json").exists() or (path / "events.jsonl").exists()


def describe(path: Path, reader: Reader) -> Description:
    if path.suffix == ".arena":
        return _arena(path)
    record = read_json(path / "run.json")
    if record is not None:
        return _memory(Place(path, record["name"], Path(record["folder"])))
    held = next((place for place in places() if place.folder == path.resolve()), None)
    return _memory(held) if held is not None else _run(path)


def _arena(path: Path) -> Description:
    arena = Arena(path)
    facts = arena_facts(arena, verify=True)
    arena.close()
    lines = [
        f"memory of rank {facts['rank']} of {facts['world']}, {facts['bytes']:,} bytes",
        slot_words(facts["slots"]),
    ]
    return Description(facts, lines, _troubles([facts]))


def _memory(place: Place) -> Description:
    facts = run_facts(place, verify=True)
    return Description(facts, run_lines(facts), _troubles(facts["arenas"] + facts["peer_copies"]) + _on_disk(facts))


def _run(path: Path) -> Description:
    events = list(read_journal(path / "events.jsonl"))
    facts: dict[str, Any] = {
        "folder": str(path),
        "events": {name: sum(e["event"] == name for e in events) for name in sorted({e["event"] for e in events})},
        "last_event": events[-1] if events else None,
        "checkpoints": disk_facts(path),
    }
    lines = [f"run folder {path}, nothing held in memory here"]
    lines += [f"  {count} × {name}" for name, count in facts["events"].items()]
    lines += [
        f"  checkpoint of step {entry['step']}: {entry['trouble'] or 'complete'}" for entry in facts["checkpoints"]
    ]
    return Description(facts, lines, _on_disk(facts))


def _troubles(arenas: list[dict[str, Any]]) -> list[str]:
    return [slot["trouble"] for arena in arenas for slot in arena["slots"] if slot["trouble"]]


def _on_disk(facts: dict[str, Any]) -> list[str]:
    return [f"step {entry['step']}: {entry['trouble']}" for entry in facts["checkpoints"] if entry["trouble"]]
