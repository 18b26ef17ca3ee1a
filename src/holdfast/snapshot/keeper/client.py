"""What the first rank of a node does about its keeper: replaces a dead or hung one, reports its failures, waits for a save.

The invariant: nothing here ends or stops the training; `wait_for_save` returns within its limits, and knows from the checkpoint
itself whether the step is on disk.
"""

import time
from pathlib import Path

from holdfast.checkpoint.folder import step_folder_name
from holdfast.snapshot.keeper.checkpoint_writer import is_published
from holdfast.snapshot.keeper.failed_saves import FailedSaveReport
from holdfast.snapshot.keeper.starting import log_end, spawn_keeper
from holdfast.snapshot.keeper.status import keeper_status
from holdfast.snapshot.memory.run_memory import MEMORY, RunMemory
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

CHECK_SECONDS = 2.0
LONGEST_CHECK_SECONDS = 60.0
STABLE_SECONDS = 10.0
FAILED_STARTS = 4
FAILED_SAVE_SECONDS = 60.0
"""how long `close` waits for a save that fails again and again"""
FREE_SECONDS = 10.0
ANNOUNCE_SECONDS = 5.0


class KeeperClient:
    def __init__(self, run_memory: RunMemory) -> None:
        self._place = run_memory
        self._failed_saves = FailedSaveReport(run_memory)
        self._next_check, self._starts, self._last_start = 0.0, 0, 0.0
        self._problem: str | None = None

    def check(self) -> None:
        """Every so often: replaces a keeper that is dead or hung, less often when it does not stay, and reports failed saves."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            self._failed_saves.update()
            if spawn_keeper(self._place) is None:
                if now - self._last_start > STABLE_SECONDS:
                    self._starts, self._problem = 0, None
                return
        except (OSError, HoldfastError) as error:
            if not self._place.path.exists():
                return  # freed this very moment
            self._report(f"the keeper cannot be replaced: {error}")
        self._starts, self._last_start = self._starts + 1, now
        self._next_check = now + min(LONGEST_CHECK_SECONDS, CHECK_SECONDS * 2 ** max(0, self._starts - FAILED_STARTS))
        if self._starts >= FAILED_STARTS:
            self._report(f"the keeper ended {self._starts - 1} times soon after its start: {log_end(self._place)}")

    def _report(self, problem: str) -> None:
        if self._problem is None:
            log(f"warning: {problem}. Nothing is saved to disk until it runs; training goes on")
        self._problem = problem

    def expect_save(self) -> None:
        """The last save is asked for now: failures of earlier ones do not count against it."""
        self._failed_saves.restart()

    def has_failed(self) -> bool:
        """Whether a save has failed for so long, or the keeper so often, that waiting for it is pointless."""
        return self._starts >= FAILED_STARTS or self._failed_saves.seconds > FAILED_SAVE_SECONDS

    def wait_for_save(self, step: int, token: str, deadline: float) -> None:
        """Until the step is on disk and the keeper has freed the memory; raises if the step is not on disk by the deadline."""
        final = self._place.folder / "checkpoints" / step_folder_name(step)
        began = time.monotonic()
        announced = False
        saved_at: float | None = None
        look = began
        while self._place.path.exists():
            self.check()
            now = time.monotonic()
            if saved_at is None and now >= look:
                look = now + 0.5
                saved_at = now if is_published(final, token) else None
            if saved_at is not None and now - saved_at > FREE_SECONDS:
                break  # what else the keeper has to do, it does alone
            if saved_at is None and (now > deadline or self.has_failed()):
                break
            if now - began > ANNOUNCE_SECONDS and not announced:
                announced = True
                log(f"waiting up to {deadline - now:.0f} s until step {step} is on disk")
            time.sleep(0.02)
        if not is_published(final, token):
            raise HoldfastError(self._not_saved(step, final))

    def _not_saved(self, step: int, final: Path) -> str:
        reason = self._failed_saves.reason or self._problem
        if not self._place.path.exists():
            return f"step {step} was not written to {final}, and its memory is gone: {reason or 'the cause is unknown'}"
        reason = reason or keeper_status(self._place).error_text or log_end(self._place)
        memory = self._place.path.parent.parent
        flag = "" if memory == Path(MEMORY) else f" --snapshot-dir {memory}"
        return (
            f"step {step} is not on disk: {reason}. The state is still in memory, in {self._place.path}; to write it once the "
            f"cause is removed: holdfast persist {self._place.folder}{flag}"
        )
