"""The other nodes of a run, as the keeper of one sees them: it is called to their meetings, and agrees with them on a step."""

import secrets
import time
from collections.abc import Sequence

from holdfast.snapshot.keeper.agreement import Meeting
from holdfast.snapshot.keeper.requests import SaveRequest
from holdfast.snapshot.memory.run_memory import RunMemory

LOOK_SECONDS = 1.0
KEPT_SECONDS = 60.0


class Partners:
    def __init__(self, run_memory: RunMemory) -> None:
        self.nodes: list[str] = []
        """All nodes, this one too, in the order of their ranks."""
        self._place = run_memory
        self._next_look, self._last_meeting = 0.0, time.monotonic()
        self._attended: set[str] = set()

    @property
    def several(self) -> bool:
        return len(self.nodes) > 1

    def call(self, busy: bool) -> bool:
        """Now and then: whether the keeper of another node waits to hear what this one holds. `busy`: it is meeting them."""
        now = time.monotonic()
        if not self.several or now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        if busy or self._meeting.over():
            self._last_meeting = now
            return False
        waiting = self._meeting.waiting() - self._attended
        self._attended |= waiting
        if not waiting and now - self._last_meeting > KEPT_SECONDS:
            self.close()
        return bool(waiting)

    def agree(self, job: SaveRequest, steps: Sequence[int]) -> int | None:
        """The newest step that all nodes hold, once they have said so."""
        job.stamp = job.stamp or secrets.token_hex(8)
        return self._meeting.agree(job.stamp, steps)

    def leave(self, job: SaveRequest) -> None:
        if job.stamp:
            self._meeting.leave(job.stamp)

    def close(self) -> None:
        """One node clears up behind all."""
        if self.several and self.nodes[0] == self._place.node:
            self._meeting.close()

    @property
    def _meeting(self) -> Meeting:
        return Meeting(self._place.folder / "checkpoints", self.nodes.index(self._place.node), len(self.nodes))
