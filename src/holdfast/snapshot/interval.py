"""How many steps snapshots are apart: as many as was asked for, or more if the device would have to wait for their copies.

The invariant: the interval only grows while a run goes on, by one at a time, and only after a whole window of snapshots that
made the device wait for more than the limit. Ranks that a supervisor starts again after a failure go on with the interval that
they had: they need not wait to find it again.
"""

import statistics
import time
from collections import deque

from holdfast.snapshot.ranks.rank_group import RankGroup

WINDOW = 8
LONGEST = 1000


class SnapshotInterval:
    """`steps` between snapshots. `max_slowdown`: the share of the training's time that the device may wait; 0 for no limit.

    `before` is what this rank wanted when it failed, or 0."""

    def __init__(self, steps: int, max_slowdown: float = 0.0) -> None:
        self.steps, self._max_slowdown = max(1, steps), max_slowdown
        self.before = 0
        self.adapts = max_slowdown > 0 and steps < LONGEST
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._recorded_at = time.perf_counter()

    def is_due(self, step: int) -> bool:
        return step % self.steps == 0

    def record(self, waited: float) -> None:
        """A copy is complete, for which the device waited this many seconds."""
        now = time.perf_counter()
        self._recent.append((waited, now - self._recorded_at))
        self._recorded_at = now

    def agree(self, step: int, rank_group: RankGroup) -> str | None:
        """Lengthens the interval, on all ranks from the same step on, if the device of any waits too long; returns the reason."""
        if not self.adapts or not rank_group.one_node:
            return None
        agreed = rank_group.agreed_interval(step, self.wanted())
        if agreed <= self.steps:
            return None
        # Ranks may have wanted different intervals when they failed; none of them lengthens its own before its window is full.
        kept = self.before > 0 and len(self._recent) < WINDOW
        waited = self.slowdown() if self._recent else 0.0
        self.steps = agreed
        self._recent.clear()
        if kept:
            return "as before the failure"
        if waited <= self._max_slowdown:
            return "the device of another rank waited too long for copies"
        return f"the device of rank {rank_group.rank} waited {waited:.1%} of the time for copies"

    def wanted(self) -> int:
        """The interval that this rank asks for."""
        if not self.adapts:
            return self.steps
        late = len(self._recent) == WINDOW and self.slowdown() > self._max_slowdown
        return max(self.steps + late, self.before)

    def slowdown(self) -> float:
        """The share of its time that the device waited lately: a median, since first copies register their memory."""
        return statistics.median(waited / max(1e-9, elapsed) for waited, elapsed in self._recent)
