"""READY slots of one rank or of all ranks of a node: which steps they hold, and whether one was overwritten meanwhile. No torch.

The invariant: a slot that training overwrote while it was read is never reported as damaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.slot import READY, DamagedError, Slot, SlotHeader
from holdfast.system.errors import HoldfastError

READS = 3
T = TypeVar("T")


class OvertakenError(HoldfastError):
    """Training overwrote the slot before the step was pinned."""


@dataclass(frozen=True)
class ReadySlot:
    """A slot that was READY when `header` was read."""

    arena: Arena
    index: int
    header: SlotHeader

    @property
    def slot(self) -> Slot:
        return self.arena.slot(self.index)

    @property
    def small(self) -> dict[str, Any]:
        return self._unless_overtaken(self.slot.small_state)

    def verify(self) -> None:
        self._unless_overtaken(self.slot.verify)

    def _unless_overtaken(self, read: Callable[[SlotHeader], T]) -> T:
        try:
            return read(self.header)
        except DamagedError:
            self.check_unchanged()
            raise

    def unchanged(self) -> bool:
        return self.slot.header() == self.header

    def check_unchanged(self) -> None:
        if not self.unchanged():
            raise OvertakenError(f"step {self.header.step} of rank {self.arena.rank} was overwritten meanwhile")


def find_ready(arena: Arena, step: int) -> ReadySlot | None:
    """The READY slot of a step; of two, the younger: a step that was repeated after a resume is in both."""
    found = [(h.sequence, i, h) for i, h in enumerate(arena.headers()) if h.state == READY and h.step == step]
    return ReadySlot(arena, *max(found, key=lambda entry: entry[0])[1:]) if found else None


def newest_generation(arenas: Sequence[Arena]) -> list[Arena]:
    """The arenas of the newest plan that has a common step; of the newest plan if none has."""
    generations = sorted({arena.generation for arena in arenas}, reverse=True)
    for generation in generations:
        group = [arena for arena in arenas if arena.generation == generation]
        if common_steps(group):
            return group
    return [arena for arena in arenas if generations and arena.generation == generations[0]]


def common_steps(arenas: Sequence[Arena]) -> list[int]:
    """The steps that every rank of this node has READY, newest first."""
    if not arenas:
        return []
    for _ in range(READS):  # ranks that train may have taken a step between two reads
        steps = set.intersection(*(arena.ready_steps() for arena in arenas))
        if steps:
            break
    whole = []
    for step in sorted(steps, reverse=True):
        ready = find_ready(arenas[0], step)
        if ready is None:
            continue
        try:
            node_ranks = ready.slot.small_state(ready.header)["here"]
        except DamagedError:
            continue
        if {arena.rank for arena in arenas} >= set(node_ranks):
            whole.append(step)
    return whole
