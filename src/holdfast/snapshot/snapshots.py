"""`Snapshots`: the run's whole state in CPU memory at every step, for any training loop.

    snapshots = Snapshots("my-run", model=model, optimizer=optimizer, extra={"scheduler": scheduler}, folder="runs/my-run")
    step = snapshots.restore()              # 0 on a fresh start
    while step < steps:
        forward_backward(...)
        snapshots.commit()                  # the last snapshot has read all of the state before anything changes it
        optimizer.step(); step += 1
        snapshots.take(step)                # returns at once; copies while the next step computes
    snapshots.close()                       # the last step is a checkpoint in runs/my-run afterwards

The invariants: a slot is overwritten only when it does not hold the newest step that every rank has; so a crash at any
instant leaves one common, whole step. The order take → commit → optimizer.step is enforced: a step during a copy raises.
Nothing here stops the training for want of memory or disk: a snapshot that cannot be taken is counted and reported.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.checkpoint.state import State
from holdfast.snapshot.attach import attach, attach_again
from holdfast.snapshot.interval import SnapshotInterval
from holdfast.snapshot.memory.copier import Copy
from holdfast.snapshot.memory.run_memory import MEMORY, RunMemory
from holdfast.snapshot.memory.slot_allocator import SlotAllocator
from holdfast.snapshot.memory.small_state import Extra, SmallState, random_state
from holdfast.snapshot.memory.tensor_watch import call_before_step
from holdfast.snapshot.nan_guard import NanGuard
from holdfast.snapshot.ranks.rank_claim import claim_rank, record_fatal_errors
from holdfast.snapshot.ranks.rank_group import Exchange, RankGroup
from holdfast.snapshot.ranks.status_page import FINISHED, STOPPED, Phase
from holdfast.snapshot.ranks.stop_signals import StopSignals
from holdfast.snapshot.restore import RestoreContext, restore, rewind
from holdfast.snapshot.saves import Saves
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import BufferedJournal
from holdfast.system.progress import log

CLOSE_SECONDS = 600.0
SLOW_COPY_SECONDS = 60.0
SAVING, PLANNING = "save", "plan"


class Snapshots:
    """See the module's docstring. `mode`: `node` keeps every node complete, `peer` divides the state over all nodes and copies
    the memory of each node to a peer node."""

    def __init__(
        self,
        name: str,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        folder: Path | str = ".",
        *,
        interval: int = 1,
        max_slowdown: float = 0.0,
        mode: str = "node",
        memory: Path | str = MEMORY,
        replica_group: dist.ProcessGroup | None = None,
        padded_rows: Mapping[str, int] | None = None,
        layout: Mapping[str, Any] | None = None,
        shared: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        hang_seconds: float = 600.0,
        kill_hung: bool = False,
        listen_to_signals: bool = True,
        journal: Callable[[Path], BufferedJournal] = BufferedJournal,
    ) -> None:
        self.state = State(model, optimizer, replica_group=replica_group, padded_rows=padded_rows)
        self.extra = Extra(extra or {})
        self.folder = Path(folder)
        self.run_memory = RunMemory.of(name, folder, memory)
        self.rank_group = RankGroup(self.run_memory)
        self.nan_guard = NanGuard(self.folder)
        self.stall_seconds = 0.0
        """How long the training waited for snapshots since the last `take` began: metrics call it snapshot_stall_ms."""
        self.copy_seconds = 0.0
        """How long the last copy took, in the background."""
        self.skipped = 0
        self.interval = SnapshotInterval(interval, max_slowdown)
        ranks = {"world": self.rank_group.world, "here": self.rank_group.node_ranks}
        fixed = {"layout": dict(layout or {}), "shared": dict(shared or {}), **ranks}
        self._small_state = SmallState(self.state, self.extra, fixed)
        self._copy: Copy | None = None
        self._committed: int | None = None
        self._exchange = Exchange()
        self._ready, self._step, self._unchecked_takes = -1, 0, 0
        self._stop_agreed = self._save_requested = self._skipping = False
        self._settings = {"hang_seconds": hang_seconds, "kill_hung": kill_hung, "mode": mode}
        with self._refusal_recorded():
            self._attach(journal)
        self.allocator = SlotAllocator(self.state, self.rank_group, mode, self.page)
        retention, on_failure = (keep_last, keep_every), partial(self._report, "not saved")
        self._saves = Saves(self.rank_group, self.allocator, retention, on_failure)
        self._stop_signals = StopSignals(self.run_memory.path, listen_to_signals)
        for optimizer in self.state.optimizers:
            call_before_step(optimizer, self._check_order)

    def _attach(self, journal: Callable[[Path], BufferedJournal]) -> None:
        """Claims this rank's status page and makes sure that the node has a keeper; refused if a live process owns the page."""
        self._journal: BufferedJournal | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank_group.rank == 0:
            self._journal = journal(self.folder / "events.jsonl")
        self._claim = claim_rank(self.rank_group, self.folder)
        self.page, self.reached, self.interval.before = self._claim.page, self._claim.reached, self._claim.interval
        attach(self.rank_group, self._settings)
        record_fatal_errors(self.page)
        nodes = len(set(self.rank_group.nodes))
        self.event("started", world=self.rank_group.world, nodes=nodes, restart=self.page["restarts"])

    @contextmanager
    def _refusal_recorded(self) -> Iterator[None]:
        """Records an error in events.jsonl. Memory or a disk that fails is an error for the user, not a defect: no traceback."""
        try:
            yield
        except HoldfastError as error:
            self.event("refused", reason=str(error))
            raise
        except OSError as error:
            reason = f"no snapshots of {self.run_memory.name} in {self.run_memory.path}: {error}"
            self.event("refused", reason=reason)
            raise HoldfastError(reason) from error

    def _check_order(self) -> None:
        if self._copy is not None and not self._copy.released:
            raise HoldfastError(
                f"optimizer.step() was called while the snapshot of step {self._copy.step} is being copied: call "
                "snapshots.commit() after backward() and before optimizer.step(), in every step"
            )

    def restore(self) -> int:
        """Loads model, optimizer, extra state and random generators from the newest whole state; returns its step, or 0."""
        self.finish_copy()
        self._ready = -1  # steps that are repeated are held as new ones
        self._exchange = Exchange()
        self.page.clear_held()
        self.page["shipped"] = 0
        self.page.beat(Phase.RESTORING)
        context = RestoreContext(
            self.state,
            self.extra,
            self.folder,
            self.rank_group,
            self.nan_guard,
            reached=self.reached,
            committed=self.page["committed"],
            event=self.event,
        )
        with self._refusal_recorded():
            found = restore(context)
        self._saves.resume(found.step, on_disk=not found.in_place)
        self._committed = found.step if found.in_place else None
        self.page["committed"] = self._committed or 0
        self.allocator.resume(found.arena, found.sequence)
        self._step = self.page["step"] = found.step
        self.page.beat(Phase.TRAINING)
        return found.step

    def rewind(self) -> int | None:
        """Loads the newest step in memory, in the middle of a run (None: it holds none). Call it between `commit` and `take`."""
        self.finish_copy()
        return rewind(self.state, self.extra, self.rank_group, self.event)

    def commit(self) -> None:
        """Waits until the last snapshot no longer reads the state. Call it after backward and before the state changes."""
        begin = time.perf_counter()
        self.page.beat(Phase.WAITING_FOR_THE_COPY)
        if self._copy is not None and self.rank_group.one_node:
            self.allocator.release(self._copy)
        if self._copy is not None and not self._copy.released:
            self.finish_copy()
        if not self.rank_group.one_node:
            self._start_exchange()
        self.page.beat(Phase.TRAINING)
        self.stall_seconds += time.perf_counter() - begin

    def _start_exchange(self) -> None:
        if self.rank_group.first_on_node and self._stop_signals.pop_save_request():
            self._save_requested = True
        stop = self._stop_signals.stop_requested()
        if self.rank_group.start_exchange(self._ready, stop, self._save_requested):
            self._save_requested = False

    def take(self, step: int) -> None:
        """Begins a snapshot of the state as it is after `step` steps; returns at once. A held step is not copied again."""
        self.stall_seconds = 0.0
        begin = time.perf_counter()
        self._step = self.page["step"] = step
        if longer := self.interval.agree(step, self.rank_group):
            self._note(step, f"every {self.interval.steps} steps from here on", longer)
        begins = self.interval.is_due(step) and step not in (self._ready, self._committed)
        if begins or self._copy is None or not self._copy.released:  # between two snapshots a released copy may go on
            self._finish_exchange()
        if self._saves.pending:
            self._saves.request(self._ready)
        if begins:
            self._begin_copy(step)
        self._saves.check_keeper()
        self._unchecked_takes += 1
        if self._unchecked_takes > 1 and self._stop_signals.signal is not None:
            self._end_by_signal(self._stop_signals.signal)
        self.page.beat(Phase.TRAINING)
        self.stall_seconds += time.perf_counter() - begin

    def _end_by_signal(self, number: int) -> None:
        """The loop never calls `stop_requested`, so the signal gets its previous effect, once the snapshot is whole; the keeper
        then writes it to disk."""
        self.finish_copy()
        log(
            f"ended by {signal.Signals(number).name} after step {self._step}; the keeper writes this step to {self.folder}"
        )
        self._stop_signals.close()
        os.kill(os.getpid(), number)

    def save(self, step: int) -> None:
        """Has the keeper write this step to disk, from memory, while training goes on. Collective.

        While an earlier save is still being written the request waits: the newest step is saved as soon as that one is done.
        """
        self._saves.step = step
        self.finish_copy()
        self._make_due_plan(SAVING)
        self._hold(step)
        self._saves.request(self._ready)

    def _make_due_plan(self, purpose: str) -> None:
        """All ranks are here, some to save, some to make a plan: a plan that any of them needs is made first. Collective."""
        while True:
            gathered = self.rank_group.gather([purpose, self.allocator.changed()])
            if not any(other == PLANNING or changed for other, changed in gathered):
                return
            self.rank_group.clear_plan_request()
            with self._refusal_recorded():
                self._renew_removed_memory()
                self.allocator.make_plan(self._small_state.size)
            if purpose == PLANNING:
                return

    def _renew_removed_memory(self) -> None:
        """Makes the memory again if a clean-up, of another job for example, has removed its files. Collective."""
        save_lost = attach_again(self.rank_group, self.allocator, self.page, self._settings)
        if save_lost is not None:
            self._note(max(0, self._ready), "lost", f"something removed {self.run_memory.path}; it is made again")
            self._saves.pending, self._ready = self._saves.pending or save_lost, -1

    def _hold(self, step: int) -> None:
        """Copies the state as it is, after `step` steps, unless this rank holds it or has no slot for it."""
        self.finish_copy()
        if self._ready != step:
            self._finish_exchange()
            self._begin_copy(step)
            self.finish_copy()

    def stop_requested(self) -> bool:
        """True on all ranks after the same step, when the run was asked to stop. Call it once per step, after `take`."""
        self._unchecked_takes = 0
        if self.rank_group.one_node:
            self._stop_agreed = self.rank_group.stop_due(self._step, self._stop_signals.stop_requested())
        return self._stop_agreed

    def report_nan(self) -> None:
        """The loss has become NaN or infinite. A state after which two resumed runs met that soon is quarantined by `restore`, if
        there is an older one."""
        if self.rank_group.rank == 0:
            self.nan_guard.report(self._step)

    def close(self) -> None:
        """Ends the snapshots of a finished or stopped run. Collective.

        The last step is on disk before the keeper frees the memory. In the `finally` of a loop that an exception ends, the keeper
        writes the newest step that is whole, as after a stop.
        """
        self.finish_copy()
        stopped = self._stop_agreed or sys.exception() is not None
        deadline = time.monotonic() + CLOSE_SECONDS
        unsaved: HoldfastError | None = None
        try:
            if not stopped:
                self._finish_saves(deadline)
        except HoldfastError as error:  # on all ranks
            unsaved = error
        self.allocator.close()
        self.page.beat(Phase.ENDED)
        self._claim.release(STOPPED if stopped else FINISHED)
        self._stop_signals.close()
        try:
            if unsaved is not None:
                raise HoldfastError(f"step {self._step} is not on disk: {unsaved}") from unsaved
            if not stopped:
                self._saves.wait_for_disk(self._step, deadline)
            reason = self._stop_signals.reason
            self.event("finished", step=self._step, stopped=stopped, reason=reason, skipped=self.skipped)
        except HoldfastError as error:
            self.event("refused", reason=str(error), step=self._step)
            raise
        finally:
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _finish_saves(self, deadline: float) -> None:
        """Requests a save of the last step, once the keeper is done with an earlier one."""
        self._saves.keeper.expect_save()
        if self._step not in (0, self._saves.step):
            self.save(self._step)
        while self._saves.pending and all(
            self.rank_group.gather(time.monotonic() < deadline and not self._saves.keeper.has_failed())
        ):
            time.sleep(0.05)
            self._saves.check_keeper()
            # A rank that had no slot for the last step would never hold what the others hold.
            if not self.allocator.pinned():
                self._hold(self._step)
            self._saves.request(self._ready)

    def event(self, name: str, **details: Any) -> None:
        """Writes one line to the run's events.jsonl, on rank 0."""
        if self._journal is not None:
            self._journal.event(name, **details)

    def finish_copy(self) -> None:
        """Waits until the last snapshot is whole."""
        copy, self._copy, begin = self._copy, None, time.perf_counter()
        if copy is None:
            return
        while not copy.done.wait(SLOW_COPY_SECONDS):
            log(f"still waiting for the snapshot of step {copy.step} to be copied; check the device and the memory")
        self.interval.record(copy.late_seconds + (time.perf_counter() - begin) * copy.released)
        if copy.trouble:
            self._report("discarded", copy.step, copy.trouble)
        else:
            self._ready, self.copy_seconds = copy.step, copy.seconds
            self._skipping = False

    def _finish_exchange(self) -> None:
        """Learns whether all ranks hold what this rank held last; after that the older snapshot may be overwritten."""
        self.finish_copy()
        if self.rank_group.one_node and self._ready in (-1, self._committed):
            return
        self.page.beat(Phase.WAITING_FOR_OTHER_RANKS)
        self._exchange = exchange = self.rank_group.finish_exchange(self._ready)
        if exchange.committed is not None:
            self._committed = self.page["committed"] = exchange.committed
        self._stop_agreed |= exchange.stop
        self._saves.pending |= exchange.save
        self.allocator.choose_for_peers(exchange.committed, exchange.shipped)

    def _begin_copy(self, step: int) -> None:
        self.page.beat(Phase.STARTING_A_COPY)
        if not self._plan_fits(step):
            return
        candidates = self._exchange.candidates
        small, random = self._small_state.get(self.allocator.plan, self.allocator.plain_numbers()), random_state()
        try:
            self._copy = self.allocator.begin(step, small, random, self._committed, candidates)
        except OSError as error:
            self._report("skipped", step, f"{self.run_memory.path}: {error.strerror or error}")
            return
        if self._copy is None:
            late = self.rank_group.late_rank(candidates[0]) if candidates else None
            reason = "every slot is being written to disk and there is no memory for another"
            if late is not None:
                reason = f"rank {late[0]} does not hold step {candidates[0]} yet (its newest is {late[1]})"
            self._report("skipped", step, reason)

    def _plan_fits(self, step: int) -> bool:
        """Makes a plan where it is due, on all ranks after the same step; False if this rank must wait for that."""
        due = self.rank_group.plan_due(step) if self.rank_group.one_node else self._exchange.plan
        changed = self.allocator.changed()
        if self.allocator.arena is None or due or (self.rank_group.world == 1 and changed):
            self._make_due_plan(PLANNING)
        elif changed:
            self.rank_group.request_plan()
            self._report("skipped", step, "tensors or memory of this rank changed; all ranks agree on new ones next")
            return False
        return True

    def _report(self, outcome: str, step: int, reason: str) -> None:
        self.skipped += 1
        self.page["skipped"], self.page["skipped_step"] = self.skipped, step
        if not self._skipping:  # the first of several in a row
            self._note(step, outcome, reason)
        self._skipping = True

    def _note(self, step: int, outcome: str, reason: str) -> None:
        log(f"snapshot of step {step} {outcome}: {reason}")
        self.event("snapshot", step=step, outcome=outcome, reason=reason)
