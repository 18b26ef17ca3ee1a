"""The ranks of a run as the snapshots see them: who is on which node, and which step all of them hold.

The invariant: `committed` is the newest step that every rank holds READY, and every rank goes on holding it until it knows of
a newer one, however far the ranks drift apart. On one node the ranks read each other's desks; over several nodes a small
all-reduce, started by `commit` and awaited by the next `take`, carries it. Nothing here runs on the device.
"""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.checkpoint.collective import gather, rank_and_world
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.snapshot.ranks.status_page import RankStatus, status_page_name

GATE_SECONDS = 10.0


class Exchange(NamedTuple):
    committed: int | None
    """The newest step that all ranks hold, if it is known."""
    candidates: tuple[int, ...] = ()
    """The newer steps that this rank holds and that the others may still come to hold, the moment after this look."""
    shipped: int | None = None
    """The step that every node has copied to another one, if it is the same."""
    stop: bool = False
    """Some rank wishes to stop."""
    save: bool = False
    """Some rank wishes a checkpoint."""
    plan: bool = False
    """The tensors of some rank have changed: all agree on a new plan now."""


class RankGroup:
    def __init__(self, run_memory: RunMemory) -> None:
        self.rank, self.world = rank_and_world()
        self.run_memory = run_memory
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            # our own, so that nothing of ours meets a collective of the training on the way; gloo, so that no device waits
            self.group = dist.new_group(backend="gloo")
        self.nodes: list[str] = self.gather(run_memory.node)
        self.here = [rank for rank, node in enumerate(self.nodes) if node == run_memory.node]
        self.first_here = self.here[0] == self.rank
        self.one_node = len(self.here) == self.world
        self._pages: dict[int, RankStatus] = {}
        self._gate: tuple[Any, torch.Tensor] | None = None
        self._wants_plan = False
        self._patience = GATE_SECONDS

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self.group)

    def open_status_pages(self) -> None:
        """Every rank has its desk from here on."""
        self.gather(None)
        self._pages = {rank: RankStatus(self.run_memory.path / status_page_name(rank)) for rank in self.here}

    def start_exchange(self, ready: int, stop: bool, save: bool) -> bool:
        """Several nodes: starts the exchange of the newest step that each rank has READY, the newest that each node has copied to
        another one, and what each rank wishes. Does not wait; False if the exchange before has not been heard yet."""
        if self._gate is not None:
            return False
        shipped = self._pages[self.rank]["shipped"]
        told = torch.tensor(
            [ready, -ready, shipped, -shipped, -int(stop), -int(save), -int(self._wants_plan)], dtype=torch.int64
        )
        self._gate = (dist.all_reduce(told, dist.ReduceOp.MIN, group=self.group, async_op=True), told)
        return True

    def finish_exchange(self, ready: int) -> Exchange:
        """What all ranks hold, now that this one holds `ready`; and, over several nodes, what they told each other."""
        if self.one_node:
            return self._read_status_pages(ready)
        if self._gate is None:
            return Exchange(None)
        work, told = self._gate
        self._gate = None
        work.wait()
        lowest, minus_highest, shipped, minus_shipped, minus_stop, minus_save, minus_plan = told.tolist()
        return Exchange(
            ready if 0 <= lowest == ready == -minus_highest else None,
            (),
            shipped if shipped == -minus_shipped else None,
            minus_stop < 0,
            minus_save < 0,
            minus_plan < 0,
        )

    def _read_status_pages(self, ready: int) -> Exchange:
        """Waits for the others, but for late ones only once: ranks that drift apart must not stop each other at every step."""
        deadline = time.monotonic() + self._patience
        pause, in_time = 0.0, True
        while late := [page for page in self._pages.values() if ready not in page.held()]:
            in_time = time.monotonic() <= deadline
            if not in_time or not all(page.can_hold(ready) and page.owner_alive() for page in late):
                break
            time.sleep(pause)
            pause = min(0.002, pause + 0.0001)
        self._patience = GATE_SECONDS if in_time else 0.0
        common = max(set.intersection(*(page.held() for page in self._pages.values())), default=None)
        newer = (step for step in self._pages[self.rank].held() if common is None or step > common)
        candidates = (step for step in newer if all(page.can_hold(step) for page in self._pages.values()))
        return Exchange(common, tuple(sorted(candidates)))

    def late_rank(self, step: int) -> tuple[int, int] | None:
        """(rank, its newest step) of the first rank of this node that does not hold the step."""
        late = ((rank, page["ready"]) for rank, page in self._pages.items() if step not in page.held())
        return next(late, None)

    def request_plan(self) -> None:
        """This rank's tensors have changed: all ranks make a new plan, after the same step."""
        self._wants_plan = True
        self._pages[self.rank]["wants_plan"] = 1

    def plan_due(self, step: int) -> bool:
        """One node: whether the new plan is made now. The first rank names a step that none can have passed: the next one."""
        leader = self._pages[self.here[0]]
        if self.first_here and not leader["plan_at"] and any(page["wants_plan"] for page in self._pages.values()):
            leader["plan_at"] = step + 1
        return 0 < leader["plan_at"] <= step

    def plan_is_made(self) -> None:
        """Called by every rank on its way into the plan's collectives, which none leaves before all have entered."""
        self._wants_plan = False
        self._pages[self.rank]["wants_plan"] = self._pages[self.rank]["plan_at"] = 0

    def stop_here(self, step: int, wish: bool) -> bool:
        """One node: whether all ranks stop after this step. Rank 0 names a step that nobody can have passed: the next one."""
        if wish:
            self._pages[self.rank]["stop_wanted"] = 1
        leader = self._pages[self.here[0]]
        if self.first_here and not leader["stop_at"] and any(page["stop_wanted"] for page in self._pages.values()):
            leader["stop_at"] = step + (1 if self.world > 1 else 0)
        return 0 < leader["stop_at"] <= step
