"""The ranks of a run as the snapshots see them: who is on which node, and which step all of them hold.

The invariant: `committed` is a step that every rank has held READY. On one node the ranks read it off each other's
desks; over several nodes a small all-reduce, started by `commit` and awaited by the next `take`, tells it. Nothing here
runs on the device.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.checkpoint.collective import gather, rank_and_world
from holdfast.snapshot.desk import Desk, desk_name
from holdfast.snapshot.place import Place

GATE_SECONDS = 10.0


class Heard(NamedTuple):
    committed: int | None
    """The step that this rank has READY, if all have it."""
    shipped: int | None = None
    """The step that every node has copied to another one, if it is the same."""
    stop: bool = False
    """Some rank wishes to stop."""
    save: bool = False
    """Some rank wishes a checkpoint."""


class Team:
    def __init__(self, place: Place) -> None:
        self.rank, self.world = rank_and_world()
        self.place = place
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            # our own, so that nothing of ours meets a collective of the training on the way; gloo, so that no device waits
            self.group = dist.new_group(backend="gloo")
        self.nodes: list[str] = self.gather(place.node)
        self.here = [rank for rank, node in enumerate(self.nodes) if node == place.node]
        self.first_here = self.here[0] == self.rank
        self.one_node = len(self.here) == self.world
        self._desks: dict[int, Desk] = {}
        self._gate: tuple[Any, torch.Tensor] | None = None

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self.group)

    def meet(self) -> None:
        """Every rank has its desk from here on."""
        self.gather(None)
        self._desks = {rank: Desk(self.place.path / desk_name(rank)) for rank in self.here}

    def announce(self, ready: int, stop: bool, save: bool) -> bool:
        """Several nodes: tells all ranks the newest step this one has READY, the newest that its node has copied to another one,
        and what it wishes. Does not wait; False if what was told before has not been heard yet."""
        if self._gate is not None:
            return False
        shipped = self._desks[self.rank]["shipped"]
        told = torch.tensor([ready, -ready, shipped, -shipped, -int(stop), -int(save)], dtype=torch.int64)
        self._gate = (dist.all_reduce(told, dist.ReduceOp.MIN, group=self.group, async_op=True), told)
        return True

    def hear(self, ready: int) -> Heard:
        """What all ranks hold; and, over several nodes, what they told each other."""
        if self.one_node:
            return Heard(ready if self._all_have(ready) else None)
        if self._gate is None:
            return Heard(None)
        work, told = self._gate
        self._gate = None
        work.wait()
        lowest, minus_highest, shipped, minus_shipped, minus_stop, minus_save = told.tolist()
        return Heard(
            ready if lowest == ready == -minus_highest else None,
            shipped if shipped == -minus_shipped else None,
            minus_stop < 0,
            minus_save < 0,
        )

    def _all_have(self, step: int) -> bool:
        deadline = time.monotonic() + GATE_SECONDS
        pause = 0.0
        while True:
            late = [rank for rank, desk in self._desks.items() if desk["ready"] < step]
            if not late:
                return True
            if time.monotonic() > deadline or not all(self._desks[rank].occupied() for rank in late):
                return False
            time.sleep(pause)
            pause = min(0.002, pause + 0.0001)

    def stop_here(self, step: int, wish: bool) -> bool:
        """One node: whether all ranks stop after this step. Rank 0 names a step that nobody can have passed: the next one."""
        if wish:
            self._desks[self.rank]["wish"] = 1
        leader = self._desks[self.here[0]]
        if self.first_here and not leader["stop_at"] and any(desk["wish"] for desk in self._desks.values()):
            leader["stop_at"] = step + (1 if self.world > 1 else 0)
        return 0 < leader["stop_at"] <= step


def share_of(ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """(which, of how many) when these ranks divide work among themselves."""
    return list(ranks).index(rank), len(ranks)
