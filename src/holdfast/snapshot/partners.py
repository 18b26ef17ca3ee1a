"""The other nodes of a run, as the keeper of one sees them: it is called to their meetings, and agrees with them on a step."""

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

from holdfast.snapshot.arena import Arena, DamagedError
from holdfast.snapshot.job import Job
from holdfast.snapshot.meeting import Meeting, meetings_in, remove_meetings
from holdfast.snapshot.persisting import OvertakenError, common_steps, held_at
from holdfast.snapshot.place import Place

LOOK_SECONDS = 1.0
KEPT_SECONDS = 60.0


class Partners:
    def __init__(self, place: Place) -> None:
        self.nodes: list[str] = []
        """All nodes, this one too, in the order of their ranks."""
        self._place, self._checkpoints = place, place.folder / "checkpoints"
        self._next_look, self._last_meeting = 0.0, time.monotonic()
        self._attended: set[str] = set()

    @property
    def several(self) -> bool:
        return len(self.nodes) > 1

    def call(self, arenas: Callable[[], list[Arena]], busy: bool) -> bool:
        """Now and then: whether the keeper of another node waits to hear what this one holds. `busy`: it is meeting them."""
        now = time.monotonic()
        if not self.several or now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        if busy or not meetings_in(self._checkpoints):
            self._last_meeting = now
            return False
        waiting = self._who_waits(arenas()) - self._attended
        self._attended |= waiting
        if not waiting and now - self._last_meeting > KEPT_SECONDS:
            self.close()
        return bool(waiting)

    def agree(self, job: Job, arenas: Sequence[Arena], steps: Sequence[int]) -> int | None:
        """The newest step that all nodes hold, once they have said so."""
        job.stamp = job.stamp or secrets.token_hex(8)
        meeting = self._meeting(arenas)
        return meeting.agree(job.stamp, steps) if meeting else None

    def leave(self, job: Job, arenas: Sequence[Arena]) -> None:
        meeting = self._meeting(arenas)
        if meeting and job.stamp:
            meeting.leave(job.stamp)

    def close(self) -> None:
        """One node clears up behind all."""
        if self.several and self._number == 0:
            remove_meetings(self._checkpoints)

    @property
    def _number(self) -> int:
        return self.nodes.index(self._place.node)

    def _who_waits(self, arenas: list[Arena]) -> set[str]:
        try:
            meeting = self._meeting(arenas)
            return meeting.waiting() if meeting else set()
        except OSError:
            return set()  # the disk will be there again
        finally:
            for arena in arenas:
                arena.close()

    def _meeting(self, arenas: Sequence[Arena]) -> Meeting | None:
        """None as long as this node holds nothing."""
        for step in common_steps(arenas)[:1]:
            held = held_at(arenas[0], step)
            with contextlib.suppress(OvertakenError, DamagedError):
                token = held.small["token"] if held else None
                return Meeting(self._checkpoints, token, self._number, len(self.nodes)) if token else None
        return None
