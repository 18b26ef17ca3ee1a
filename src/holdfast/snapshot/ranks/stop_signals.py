"""Requests to stop: signals of the scheduler, files in the run folder, `holdfast persist --stop`; over several nodes, to save.

The invariant: a signal handler only records the request; every rank acts on it after the same step. The keeper watches the run
folder for `persist` and `error.txt`, and hands requests on as files in memory.
"""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

TRIGGERS = ("persist", "error.txt")
STOP, SAVE = "stop", "save"


class StopSignals:
    """The requests to this rank. SIGTERM comes from torchrun, Slurm and Kubernetes; SIGUSR1 from Slurm's `--signal`."""

    def __init__(self, memory: Path, listen: bool) -> None:
        self._stop_file, self._save_file = memory / STOP, memory / SAVE
        self.reason: str | None = None
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}
        if listen and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason, self.signal = signal.Signals(number).name, number
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def stop_requested(self) -> bool:
        # The keeper watches the run folder, which may be slow and shared; this file is in memory.
        if self.reason is None and self._stop_file.exists():
            self.reason = self._stop_file.read_text(encoding="utf-8", errors="replace") or "asked"
        return self.reason is not None

    def pop_save_request(self) -> bool:
        """Whether a checkpoint was asked for since the last call; for one rank of each node."""
        try:
            self._save_file.unlink()
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
