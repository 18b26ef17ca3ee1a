"""The verbs `snapshots` and `persist`: look at what is held of a run, and have it written to disk. No torch."""

import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from holdfast.errors import HoldfastError

ANSWER_SECONDS = 600.0


def snapshots(
    run: Annotated[str, tyro.conf.Positional],
    *,
    snapshot_dir: str = "/dev/shm",
    verify: bool = False,
    json: bool = False,
) -> None:
    """Show what is held of a run, in memory and on disk: which step, verified or not, how many bytes.

    holdfast snapshots runs/gpt

    Args:
        run: Name or folder of the run.
        snapshot_dir: Memory file system that holds the snapshots.
        verify: Compare every byte in memory with its digest now, instead of telling the keeper's last word.
        json: Print the facts as JSON.
    """
    import sys

    from holdfast.snapshot.place import find_place
    from holdfast.snapshot.report import disk_facts, run_facts, run_lines

    try:
        facts = run_facts(find_place(run, snapshot_dir), verify)
    except HoldfastError:
        if not Path(run).is_dir():
            raise
        facts = {"run": Path(run).name, "folder": str(Path(run).resolve()), "memory": None, "bytes": 0, "keeper": False}
        facts |= {
            "common_steps": [],
            "ranks": [],
            "arenas": [],
            "peer_copies": [],
            "checkpoints": disk_facts(Path(run)),
        }
    if json:
        import orjson

        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        print("\n".join(run_lines(facts)))


def persist(
    run: Annotated[str, tyro.conf.Positional], *, stop: bool = False, snapshot_dir: str = "/dev/shm", json: bool = False
) -> None:
    """Write the newest memory snapshot of a run to disk now, with or without living trainers; prints the checkpoint's path.

    holdfast persist runs/gpt --stop

    Args:
        run: Name or folder of the run.
        stop: End the run after the next step as well.
        snapshot_dir: Memory file system that holds the snapshots.
        json: Print the path as JSON.
    """
    from holdfast.snapshot.place import find_place

    path = persist_now(find_place(run, snapshot_dir), stop)
    if json:
        import sys

        import orjson

        sys.stdout.write(orjson.dumps({"path": str(path)}).decode() + "\n")
    else:
        print(path)


def persist_now(place: Any, stop: bool) -> Path:
    """Asks the keeper; one is started where there is none."""
    from holdfast.snapshot.place import keeper_alive, read_json, write_json
    from holdfast.snapshot.starting import start_keeper

    name = f"{time.time_ns():020d}-persist"
    write_json(place.requests / f"{name}.json", {"kind": "persist", "stop": stop})
    start_keeper(place)
    answer_path = place.requests / f"{name}.answer.json"
    deadline = time.monotonic() + ANSWER_SECONDS
    while (answer := read_json(answer_path)) is None:
        if time.monotonic() > deadline or not (place.path.exists() and keeper_alive(place)):
            raise HoldfastError(f"the keeper of {place.name} did not answer; see {place.path / 'keeper.log'}")
        time.sleep(0.02)
    answer_path.unlink(missing_ok=True)
    if answer["path"] is None:
        raise HoldfastError(f"nothing was written: {answer['trouble']}")
    return Path(answer["path"])
