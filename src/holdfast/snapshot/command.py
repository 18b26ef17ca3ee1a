"""The verbs `snapshots` and `persist`: show the state of a run in memory and on disk, and write it to disk. No torch."""

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result
from holdfast.system.errors import HoldfastError, UsageError

ANSWER_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class SnapshotsOptions:
    """Show the state that is held of a run, in memory and on disk: which step, verified or not, how many bytes.

    Examples:

      holdfast snapshots runs/first
      holdfast snapshots runs/first --verify --json
      holdfast snapshots runs/first --watch
    """

    run: str = field(metadata=positional())
    """Name or folder of the run."""
    snapshot_dir: str = "/dev/shm"
    """Memory file system that holds the snapshots."""
    verify: bool = False
    """Compare every byte in memory and on disk with its checksum now. Unset: show the keeper's last check of the memory, and
    compare only the sizes of the files on disk."""
    watch: bool = False
    """Show the facts again every second, until Ctrl-C."""
    json: bool = False
    """Print the facts as JSON."""


def snapshots(options: SnapshotsOptions) -> None:
    from holdfast.snapshot.report import run_lines

    if options.watch:
        if options.json or options.verify:
            raise UsageError("--watch goes with neither --json nor --verify")
        from holdfast.system.live_text import watch_text

        watch_text(lambda: "\n".join(run_lines(find_run(options.run, options.snapshot_dir, verify=False))))
        return
    facts = find_run(options.run, options.snapshot_dir, options.verify)
    print_result(facts, "\n".join(run_lines(facts)), options.json)


def find_run(run: str, memory: str, verify: bool) -> dict[str, Any]:
    """What is held of the run of this name or folder; an unknown name is an error that lists the runs that exist."""
    from holdfast.snapshot.memory.run_memory import find_run_memory, run_memories
    from holdfast.snapshot.report import disk_only_facts, is_run_folder, run_facts, run_folders_in

    folder = real_path(run)
    limit = float("inf") if verify else 0
    known = run_memories(memory)
    if any(run_memory.name == run or run_memory.folder == folder for run_memory in known):
        with suppress(FileNotFoundError):  # the run has ended, and its memory was freed meanwhile
            return run_facts(find_run_memory(run, memory), verify, limit)
    if is_run_folder(folder):
        return disk_only_facts(folder, limit)
    held = [f"{run_memory.name} ({run_memory.folder})" for run_memory in known]
    parents = {folder, folder.parent, Path("runs").absolute()}
    near = [str(found) for parent in parents for found in run_folders_in(parent)]
    what = f"{run} is a folder but not a run" if folder.is_dir() else f"there is no run {run}"
    raise HoldfastError(
        f"{what}. Runs in memory: {', '.join(held) or 'none'}. Run folders near it: {', '.join(sorted(near)) or 'none'}"
    )


def real_path(path: str) -> Path:
    """The path without symbolic links. One that leads to itself is an error, which `resolve` reports in some Pythons."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise HoldfastError(f"{path} is a symbolic link that leads to itself") from None
    return Path(path).resolve()


@dataclass(frozen=True, kw_only=True)
class PersistOptions:
    """Write the newest memory snapshot of a run to disk now, with or without live trainers; prints the checkpoint's path.

    Examples:

      holdfast persist runs/first
      holdfast persist runs/first --stop
    """

    run: str = field(metadata=positional())
    """Name or folder of the run."""
    stop: bool = False
    """End the run after the next step as well."""
    snapshot_dir: str = "/dev/shm"
    """Memory file system that holds the snapshots."""
    json: bool = False
    """Print the path as JSON."""


def persist(options: PersistOptions) -> None:
    from holdfast.snapshot.memory.run_memory import find_run_memory

    real_path(options.run)  # a symbolic link that leads to itself is an error
    path = persist_now(find_run_memory(options.run, options.snapshot_dir), options.stop)
    print_result({"path": str(path)}, str(path), options.json, indent=False)


def persist_now(run_memory: Any, stop: bool) -> Path:
    """Requests the save from the keeper, which is started if there is none; returns the checkpoint's path."""
    from holdfast.snapshot.keeper.client import start_keeper
    from holdfast.snapshot.memory.run_memory import keeper_alive, read_json, write_json

    name = f"{time.time_ns():020d}-persist"
    try:
        write_json(run_memory.requests / f"{name}.json", {"kind": "persist", "stop": stop})
    except FileNotFoundError:
        raise HoldfastError(f"the run {run_memory.name} has just ended, and its memory was freed") from None
    start_keeper(run_memory)
    answer_path = run_memory.requests / f"{name}.answer.json"
    deadline = time.monotonic() + ANSWER_SECONDS
    while (answer := read_json(answer_path)) is None:
        if time.monotonic() > deadline or not (run_memory.path.exists() and keeper_alive(run_memory)):
            raise HoldfastError(f"the keeper of {run_memory.name} did not answer; see {run_memory.path / 'keeper.log'}")
        time.sleep(0.02)
    answer_path.unlink(missing_ok=True)
    if answer["path"] is None:
        raise HoldfastError(f"nothing was written: {answer['trouble']}")
    return Path(answer["path"])
