"""Watches the ranks of a node: which died without an end, and which hang.

The invariant: only time during which the keeper itself was running counts, so a suspended machine has no hung rank; a rank is
hung when at least three checks read the same heartbeat. A heartbeat of 0 does not count.
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


class HeartbeatAge:
    """How long a heartbeat has not changed, by the time between the checks that read it."""

    def __init__(self) -> None:
        self._heartbeat, self._seconds, self._last_check = 0, 0.0, 0.0

    def exceeds(self, limit: float, heartbeat: int) -> bool:
        now = time.monotonic()
        if heartbeat == 0 or heartbeat != self._heartbeat:
            self._heartbeat, self._seconds = heartbeat, 0.0
        else:
            self._seconds += min(now - self._last_check, limit / 2)
        self._last_check = now
        return self._seconds > max(limit, 1.0)


class RankWatch:
    def __init__(self, run_memory: RunMemory, journal: Journal) -> None:
        self._run_memory, self._journal = run_memory, journal
        self._reported: set[tuple[int, int, str]] = set()
        self._ages: dict[tuple[int, int], HeartbeatAge] = {}

    def check(self, pages: dict[int, RankStatus], settings: dict[str, Any]) -> list[str]:
        """`died` or `hung` for each rank that did so since the last check."""
        limit, kill_hung = settings.get("hang_seconds", 600.0), bool(settings.get("kill_hung"))
        found = []
        for rank, page in pages.items():
            started = page["started"]
            alive = page.owner_alive()
            age = self._ages.setdefault((rank, started), HeartbeatAge())
            if page["status"] == RUNNING and not alive:
                if self._is_new(rank, started, "died"):
                    self._report("died", rank, page, pages)
                    found.append("died")
            elif alive and age.exceeds(limit, page["heartbeat"]) and self._is_new(rank, started, "hung"):
                self._handle_hung(rank, page, pages, kill_hung)
                found.append("hung")
                if kill_hung:
                    break  # the others end too, or are new processes
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

    def _handle_hung(self, rank: int, page: RankStatus, pages: dict[int, RankStatus], kill: bool) -> None:
        processes = [(other["process"], other["started"]) for other in pages.values() if other.owner_alive()]
        for other in pages.values():
            if other.owner_alive() and (self._run_memory.path / f"{other.path.stem}.stacks").exists():
                _signal(other["process"], signal.SIGUSR2)
        self._report("hung", rank, page, pages)
        self._copy_stacks(pages)
        for process, started in processes if kill else ():
            if process_alive(process, started):
                _signal(process, signal.SIGKILL)

    def _copy_stacks(self, pages: dict[int, RankStatus]) -> None:
        """Copies the stack traces that the ranks wrote to the run folder; a stopped process writes none."""
        time.sleep(STACKS_SECONDS)
        for page in pages.values():
            stacks = self._run_memory.path / f"{page.path.stem}.stacks"
            with contextlib.suppress(OSError):  # a full disk must not keep the hung rank alive
                if stacks.exists() and stacks.stat().st_size:
                    target = self._run_memory.folder / "stacks" / f"{page.path.stem}.txt"
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(stacks, target)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
