"""What an earlier start left of a run on this host: state to continue from, and ranks that still train."""

import time
from pathlib import Path

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.system.errors import HoldfastError
from holdfast.system.run_claim import LEAVE_SECONDS


def has_state(folder: Path, memory: str) -> bool:
    """Whether the run has done a step: a checkpoint, a logged iteration, or a snapshot in memory."""
    metrics = folder / "metrics.jsonl"
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or bool(checkpoints_in(folder)) or bool(_place(folder, memory).arenas())


def refuse_live_ranks(folder: Path, memory: str) -> None:
    """Raises if ranks of the run outlived the process that had claimed it. Ranks that are just ending get a moment."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while live := [desk["process"] for desk in _place(folder, memory).pages().values() if desk.owner_alive()]:
        if time.monotonic() > deadline:
            raise HoldfastError(
                f"{folder} is in use: process {live[0]} still trains into it. Stop that run first: "
                f"holdfast persist {folder} --stop"
            )
        time.sleep(0.1)


def _place(folder: Path, memory: str) -> RunMemory:
    return RunMemory.of(folder.resolve().name, folder, memory)
