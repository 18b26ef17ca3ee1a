"""Reports failed saves: the keeper, which has no terminal, records them, and the first rank of the node logs them.

The keeper writes one record in memory, where a full disk does not matter, and removes it after the next successful write.
"""

import contextlib
import time
from pathlib import Path

from holdfast.snapshot.memory.run_memory import RunMemory, read_json, write_json
from holdfast.system.progress import log


def _record(run_memory: RunMemory) -> Path:
    return run_memory.path / "failed_save.json"


def record_failed_save(run_memory: RunMemory, step: int | None, reason: str, retry_seconds: float | None) -> None:
    """`retry_seconds`: None if the save is not tried again."""
    with contextlib.suppress(OSError):  # full memory must not end the keeper
        write_json(_record(run_memory), {"step": step, "reason": reason, "retry_seconds": retry_seconds})


def clear_failed_save(run_memory: RunMemory) -> None:
    _record(run_memory).unlink(missing_ok=True)


class FailedSaveReport:
    """Logs each failed save once, and the success that follows it."""

    def __init__(self, run_memory: RunMemory) -> None:
        self._run_memory = run_memory
        self._shown: str | None = None
        self._since = 0.0
        self.reason: str | None = None

    @property
    def seconds(self) -> float:
        """How long saves have failed; 0 if the last one succeeded."""
        return time.monotonic() - self._since if self.reason is not None else 0.0

    def restart(self) -> None:
        """Counts `seconds` from now: what failed before may succeed now."""
        self._since = time.monotonic()

    def update(self) -> None:
        found = read_json(_record(self._run_memory))
        if found is None:
            if self._shown is not None and self._run_memory.path.exists():
                log("saves succeed again")
                self.reason = None
            self._shown = None
            return
        if self.reason is None:
            self._since = time.monotonic()
        self.reason = found["reason"]
        what = "the newest step" if found["step"] is None else f"step {found['step']}"
        if what != self._shown:
            self._shown = what
            retry = found["retry_seconds"]
            then = "It is not tried again" if retry is None else f"The state stays in memory; next try in {retry:.0f} s"
            log(f"warning: {what} could not be saved: {found['reason']}. {then}")
