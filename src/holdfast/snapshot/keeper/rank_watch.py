"""The keeper's eye on the ranks of its node: which died without leaving, and which gives no sign of life.

The invariant: a rank counts as hung only by time that the keeper itself was running: a machine that stood still has no hung rank,
and at least three looks saw the same heartbeat. A heartbeat of 0 says nothing.
"""

import contextlib
import os
import shutil
import signal
import time
from typing import Any

from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.snapshot.ranks.status_page import RUNNING, RankStatus
from holdfast.system.journal import Journal
from holdfast.system.processes import process_alive

STACKS_SECONDS = 0.3


class Silence:
    """How long one heartbeat word has kept its value, as far as the watcher saw it."""

    def __init__(self) -> None:
        self._heartbeat, self._seconds, self._last_look = 0, 0.0, 0.0

    def is_longer_than(self, limit: float, heartbeat: int) -> bool:
        now = time.monotonic()
        if heartbeat == 0 or heartbeat != self._heartbeat:
            self._heartbeat, self._seconds = heartbeat, 0.0
        else:
            self._seconds += min(now - self._last_look, limit / 2)
        self._last_look = now
        return self._seconds > max(limit, 1.0)


class RankWatch:
    def __init__(self, run_memory: RunMemory, journal: Journal) -> None:
        self._place, self._journal = run_memory, journal
        self._reported: set[tuple[int, int, str]] = set()
        self._silences: dict[tuple[int, int], Silence] = {}

    def check(self, pages: dict[int, RankStatus], settings: dict[str, Any]) -> list[str]:
        """What is new: `died` or `hung`, once for each rank that did."""
        patience, kill_hung = settings.get("hang_seconds", 600.0), bool(settings.get("kill_hung"))
        found = []
        for rank, page in pages.items():
            started = page["started"]
            alive = page.owner_alive()
            silence = self._silences.setdefault((rank, started), Silence())
            if page["status"] == RUNNING and not alive:
                if self._is_new(rank, started, "died"):
                    self._report("died", rank, page, pages)
                    found.append("died")
            elif alive and silence.is_longer_than(patience, page["heartbeat"]) and self._is_new(rank, started, "hung"):
                self._end_hung(rank, page, pages, kill_hung)
                found.append("hung")
                if kill_hung:
                    break  # the others are ending, or are new processes already
        return found

    def _is_new(self, rank: int, started: int, kind: str) -> bool:
        new = (rank, started, kind) not in self._reported
        self._reported.add((rank, started, kind))
        return new

    def _report(self, kind: str, rank: int, page: RankStatus, pages: dict[int, RankStatus]) -> None:
        states = {str(r): f"step {d['step']}, {d.phase_name}, {d.age:.1f} s ago" for r, d in pages.items()}
        cause = page.error_text
        self._journal.event(
            "failure", kind=kind, rank=rank, step=page["step"], process=page["process"], cause=cause, ranks=states
        )
        print(f"rank {rank} {kind} at step {page['step']}: {cause or 'no error message'}; {states}", flush=True)

    def _end_hung(self, rank: int, page: RankStatus, pages: dict[int, RankStatus], kill: bool) -> None:
        processes = [(other["process"], other["started"]) for other in pages.values() if other.owner_alive()]
        for other in pages.values():
            if other.owner_alive() and (self._place.path / f"{other.path.stem}.stacks").exists():
                _signal(other["process"], signal.SIGUSR2)
        self._report("hung", rank, page, pages)
        self._keep_stacks(pages)
        for process, started in processes if kill else ():
            if process_alive(process, started):
                _signal(process, signal.SIGKILL)

    def _keep_stacks(self, pages: dict[int, RankStatus]) -> None:
        """Copies the stacks that the ranks wrote to the run folder; a rank that is stopped writes none."""
        time.sleep(STACKS_SECONDS)
        for page in pages.values():
            stacks = self._place.path / f"{page.path.stem}.stacks"
            with contextlib.suppress(OSError):  # a full disk: the rank is ended all the same
                if stacks.exists() and stacks.stat().st_size:
                    target = self._place.folder / "stacks" / f"{page.path.stem}.txt"
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(stacks, target)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
