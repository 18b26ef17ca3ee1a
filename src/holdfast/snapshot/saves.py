"""Requests to the keeper to write a step to disk: made by all ranks together, one at a time.

The invariant: every rank has pinned its slot of the step before the keeper sees the request; a request that any rank cannot make
is taken back on all and made again for the newest step.
"""

import time
from collections.abc import Callable

from holdfast.checkpoint.collective import agreed
from holdfast.snapshot.keeper.client import KeeperClient
from holdfast.snapshot.memory.ready_slot import find_ready
from holdfast.snapshot.memory.run_memory import write_json
from holdfast.snapshot.memory.slot import DamagedError
from holdfast.snapshot.memory.slot_allocator import SlotAllocator
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.system.errors import HoldfastError


class Saves:
    """`on_failure(step, reason)` is called if a request cannot be written."""

    def __init__(
        self,
        rank_group: RankGroup,
        allocator: SlotAllocator,
        retention: tuple[int | None, int | None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self._rank_group, self._run_memory, self._allocator = rank_group, rank_group.run_memory, allocator
        self._retention, self._on_failure = retention, on_failure
        self.keeper = KeeperClient(rank_group.run_memory)
        self.pending = False
        """A save was asked for, and waits for an earlier one or for ranks that hold another step."""
        self.step = 0
        """the last step that was asked for, or that is on disk since the run resumed from it"""
        self._resumed: int | None = None
        self._requested: tuple[int, str] | None = None
        """the last request to the keeper: step, and the start of the run that wrote the step"""

    def resume(self, step: int, on_disk: bool) -> None:
        self.step = step if on_disk else 0
        self._resumed, self._requested = step, None

    def check_keeper(self) -> None:
        """Replaces a keeper that died or hangs; the new one continues with what is in memory."""
        if self._rank_group.first_on_node:
            self.keeper.check()

    def request(self, newest: int) -> None:
        """Requests the newest step of this rank, if all ranks hold the same and no save is being written; collective."""
        rank_group = self._rank_group
        gathered = rank_group.gather([self._allocator.pinned(), newest])
        self.pending = any(pinned for pinned, _ in gathered) or len({step for _, step in gathered}) > 1
        if self.pending:
            return
        token = self._pin(newest)
        path = self._run_memory.requests / f"{time.monotonic_ns():020d}-save.json"
        written = all(rank_group.gather(token is not None))  # all slots are pinned before any keeper may release them
        try:
            if written and rank_group.first_on_node:
                request = {"kind": "save", "step": newest, "token": token, "retention": self._retention}
                write_json(path, {**request, "resumed": self._resumed})
        except OSError as error:
            written = False
            self._on_failure(newest, f"the request to the keeper could not be written: {error}")
        if all(rank_group.gather(written)):
            self._requested = (newest, str(token))
        else:
            self._allocator.pin(newest, False)
            path.unlink(missing_ok=True)
            self.pending = True

    def _pin(self, step: int) -> str | None:
        """Pins the slot of this step; returns the start of the run that wrote it, or None if this rank does not hold it."""
        arena = self._allocator.arena
        found = find_ready(arena, step) if arena is not None else None
        if found is None:
            return None
        try:
            token = str(found.slot.small_state(found.header)["token"])
        except DamagedError:
            return None
        return token if self._allocator.pin(step) else None

    def wait_for_disk(self, last: int, deadline: float) -> None:
        """Waits until step `last` is on disk; all ranks raise the same error if it is not by the deadline. Collective."""
        step, token = (last, "") if self.pending else self._requested or (self.step, "")
        with agreed(self._rank_group.group):
            if self._rank_group.first_on_node and (self._requested or self.pending):
                self.keeper.wait_for_save(step, token, deadline)
            if step != last:
                raise HoldfastError(
                    f"step {last} is not on disk: it could not be copied to {self._run_memory.path}. Step {step} is the "
                    f"last that was saved to {self._run_memory.folder}"
                )
