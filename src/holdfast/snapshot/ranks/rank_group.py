"""The ranks of a run as the snapshots see them: which rank is on which node, and which step all of them hold.

The invariant: `committed` is the newest step that every rank holds READY, and every rank goes on holding it until it knows of
a newer one, however far the ranks drift apart. On one node the ranks read each other's status pages; over several nodes a small
all-reduce, started by `commit` and awaited by the next `take`, carries it. Nothing here runs on the device.
"""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.checkpoint.collective import gather, rank_and_world
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.snapshot.ranks.status_page import RankStatus, status_page_name

EXCHANGE_SECONDS = 10.0
INTERVALS = 1 << 16


class Exchange(NamedTuple):
    committed: int | None = None
    """The newest step that all ranks hold, if it is known."""
    candidates: tuple[int, ...] = ()
    """The newer steps that this rank holds and that the other ranks may still come to hold."""
    shipped: int | None = None
    """The step that every node has copied to another one, if it is the same."""
    stop: bool = False
    """Some rank was asked to stop."""
    save: bool = False
    """Some rank was asked for a checkpoint."""
    plan: bool = False
    """The tensors of some rank have changed: all ranks make a new plan now."""


class RankGroup:
    def __init__(self, run_memory: RunMemory) -> None:
        self.rank, self.world = rank_and_world()
        self.run_memory = run_memory
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            # A group of its own, so that no collective of the training is mixed up with these; gloo, so that no device waits.
            self.group = dist.new_group(backend="gloo")
        self.nodes: list[str] = self.gather(run_memory.node)
        self.node_ranks = [rank for rank, node in enumerate(self.nodes) if node == run_memory.node]
        self.first_on_node = self.node_ranks[0] == self.rank
        self.one_node = len(self.node_ranks) == self.world
        self._pages: dict[int, RankStatus] = {}
        self._pending: tuple[Any, torch.Tensor] | None = None
        """an all-reduce that was started, and its tensor"""
        self._plan_requested = False
        self._wait_seconds = EXCHANGE_SECONDS

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self.group)

    def open_status_pages(self) -> None:
        """Opens the status pages of this node, once every rank has claimed its own."""
        self.gather(None)
        self._pages = {rank: RankStatus(self.run_memory.path / status_page_name(rank)) for rank in self.node_ranks}

    def start_exchange(self, ready: int, stop: bool, save: bool) -> bool:
        """Several nodes: starts the exchange of the newest step that each rank has READY, the newest that each node has copied to
        another one, and the requests of each rank. Does not wait; False if the previous exchange is not finished yet."""
        if self._pending is not None:
            return False
        shipped = self._pages[self.rank]["shipped"]
        values = torch.tensor(
            [ready, -ready, shipped, -shipped, -int(stop), -int(save), -int(self._plan_requested)], dtype=torch.int64
        )
        self._pending = (dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group, async_op=True), values)
        return True

    def finish_exchange(self, ready: int) -> Exchange:
        """What all ranks hold, now that this one holds `ready`; over several nodes also their requests."""
        if self.one_node:
            return self._read_status_pages(ready)
        if self._pending is None:
            return Exchange()
        work, values = self._pending
        self._pending = None
        work.wait()
        lowest, minus_highest, shipped, minus_shipped, minus_stop, minus_save, minus_plan = values.tolist()
        return Exchange(
            ready if 0 <= lowest == ready == -minus_highest else None,
            (),
            shipped if shipped == -minus_shipped else None,
            minus_stop < 0,
            minus_save < 0,
            minus_plan < 0,
        )

    def _read_status_pages(self, ready: int) -> Exchange:
        """Waits for the other ranks, but only once for late ones: ranks that drift apart must not stop each other every step."""
        deadline = time.monotonic() + self._wait_seconds
        pause, in_time = 0.0, True
        while late := [page for page in self._pages.values() if ready not in page.held()]:
            in_time = time.monotonic() <= deadline
            if not in_time or not all(page.can_hold(ready) and page.owner_alive() for page in late):
                break
            time.sleep(pause)
            pause = min(0.002, pause + 0.0001)
        self._wait_seconds = EXCHANGE_SECONDS if in_time else 0.0
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
        self._plan_requested = True
        self._pages[self.rank]["plan_requested"] = 1

    def plan_due(self, step: int) -> bool:
        """One node: whether the new plan is made now."""
        return self._due("plan_requested", "plan_at", step, delay=1)

    def clear_plan_request(self) -> None:
        """Called by every rank before the collectives of the plan, which no rank leaves before all have entered."""
        self._plan_requested = False
        self._pages[self.rank]["plan_requested"] = self._pages[self.rank]["plan_at"] = 0

    def stop_due(self, step: int, requested: bool) -> bool:
        """One node: whether all ranks stop after this step. `requested`: this rank was asked to stop."""
        if requested:
            self._pages[self.rank]["stop_requested"] = 1
        return self._due("stop_requested", "stop_at", step, delay=1 if self.world > 1 else 0)

    def agreed_interval(self, step: int, wanted: int) -> int:
        """One node: the longest interval between snapshots that any rank wants, from the step on that the first rank names; 0
        before it names one. Its word holds the step and the interval together, so that they are read as one."""
        self._pages[self.rank]["interval_wanted"] = wanted
        first = self._pages[self.node_ranks[0]]
        longest = max(page["interval_wanted"] for page in self._pages.values())
        if self.first_on_node and longest > first["interval"] % INTERVALS:
            first["interval"] = (step + 1) * INTERVALS + longest
        begin, interval = divmod(first["interval"], INTERVALS)
        return interval if begin <= step else 0

    def _due(self, request: str, at: str, step: int, delay: int) -> bool:
        """Whether what any rank requested is due. The first rank names a step that no rank can have passed: the next one."""
        first = self._pages[self.node_ranks[0]]
        if self.first_on_node and not first[at] and any(page[request] for page in self._pages.values()):
            first[at] = step + delay
        return 0 < first[at] <= step
