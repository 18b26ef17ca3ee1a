"""How long the start of a rank takes, part by part, and how long ago the failure was that it follows.

The event `resumed` records both: the journal here holds that event back until the first step after it is done. All times are
of CLOCK_MONOTONIC, which the processes of a node share: a change of the wall clock moves none of them.
"""

import os
import time
from pathlib import Path
from typing import Any

from holdfast.system.journal import BufferedJournal

FAILED_AT = "HOLDFAST_FAILED_AT"
"""Environment variable: when the supervisor noticed the failure. Unset on the first start."""
STARTED_AT = "HOLDFAST_STARTED_AT"
"""Environment variable: when the supervisor started this rank."""


def now_text() -> str:
    """This moment, as the environment variables carry it."""
    return repr(time.monotonic())


class StartTimeline:
    """The seconds of each part of a start, in order. `mark` ends a part, `step_done` the last one."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._failed, started = (_read(name) for name in (FAILED_AT, STARTED_AT))
        self._seconds: dict[str, float] = {}
        self._journal: ResumeJournal | None = None
        self._complete = False
        if started is not None:
            if self._failed is not None:
                self._seconds["end ranks"] = max(0.0, started - self._failed)
            self._seconds["start process"] = max(0.0, self._last - started)

    def mark(self, part: str) -> None:
        now = time.monotonic()
        self._seconds[part] = now - self._last
        self._last = now

    def journal(self, path: Path) -> "ResumeJournal":
        """The journal for events.jsonl of this start."""
        self._journal = ResumeJournal(path)
        return self._journal

    def step_done(self) -> None:
        """Call it after every step: the first one ends the timeline."""
        if self._complete:
            return
        self._complete = True
        self.mark("first step")
        details: dict[str, Any] = {"timeline": {part: round(seconds, 4) for part, seconds in self._seconds.items()}}
        if self._failed is not None:
            details = {"seconds_since_failure": round(max(0.0, self._last - self._failed), 4), **details}
        if self._journal is not None:
            self._journal.write_resumed(details)


class ResumeJournal(BufferedJournal):
    """Writes the event `resumed` when the first step is done, or the run ends before that."""

    _resumed: dict[str, Any] | None = None

    def event(self, name: str, **details: Any) -> None:
        if name == "resumed":
            self._resumed = details
        else:
            super().event(name, **details)

    def write_resumed(self, more: dict[str, Any]) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            super().event("resumed", **resumed, **more)

    def close(self) -> None:
        self.write_resumed({})
        super().close()


def _read(name: str) -> float | None:
    try:
        return float(os.environ[name])
    except (KeyError, ValueError):
        return None
