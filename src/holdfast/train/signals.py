"""Requests to stop that come from outside: SIGTERM and SIGUSR1, and the files `persist` and `error.txt` in the run folder.

A handler only notes the request; the loop agrees on it over all ranks at a step boundary, so that all stop after the same step.
"""

import os
import signal
from pathlib import Path
from types import FrameType

TRIGGERS = ("persist", "error.txt")


class StopRequests:
    """Whether this rank was asked to stop. Trigger files are looked for by each node's first rank."""

    def __init__(self, folder: str | None) -> None:
        self._asked = False
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._files = [Path(folder) / name for name in TRIGGERS] if folder and first else []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def requested(self) -> bool:
        return self._asked or any(file.exists() for file in self._files)

    def consume(self) -> None:
        """Removes the trigger files, so that the next start does not stop at once."""
        for file in self._files:
            file.unlink(missing_ok=True)
