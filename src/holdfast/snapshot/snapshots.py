"""`Snapshots`: the run's whole state in CPU memory at every step, for any training loop.

    snapshots = Snapshots("my-run", model=model, optimizer=optimizer, extra={"scheduler": scheduler}, folder="runs/my-run")
    step = snapshots.restore()              # 0 on a fresh start
    while step < steps:
        forward_backward(...)
        snapshots.commit()                  # the last snapshot is whole before anything changes the state
        optimizer.step(); step += 1
        snapshots.take(step)                # returns at once; copies while the next step computes
    snapshots.close()                       # the last step is a checkpoint in runs/my-run afterwards

The invariants: a slot is overwritten only when it does not hold the newest step that every rank has; so a crash at any
instant leaves one common, whole step. The order take → commit → optimizer.step is enforced: a step during a copy raises.
Nothing here stops the training for want of memory or disk: a snapshot that cannot be taken is counted and reported.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import torch
import torch.distributed as dist

from holdfast.checkpoint.collective import agree
from holdfast.checkpoint.json_state import encode
from holdfast.checkpoint.state import State
from holdfast.snapshot.keeper.client import KeeperClient, start_keeper
from holdfast.snapshot.memory.arena import DamagedError
from holdfast.snapshot.memory.copier import Copy
from holdfast.snapshot.memory.random_state import Extra, random_state
from holdfast.snapshot.memory.ready_slot import find_ready
from holdfast.snapshot.memory.run_memory import MEMORY, RunMemory, remove_stale, write_json
from holdfast.snapshot.memory.slot_allocator import SlotAllocator
from holdfast.snapshot.nan_guard import NanGuard
from holdfast.snapshot.ranks.rank_group import Exchange, RankGroup
from holdfast.snapshot.ranks.status_page import FINISHED, STOPPED, RankStatus, status_page_name
from holdfast.snapshot.ranks.stop_signals import SAVE, STOP, StopSignals
from holdfast.snapshot.restore import restore
from holdfast.system.descriptors import open_private
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import BufferedJournal
from holdfast.system.leases import BackgroundLease
from holdfast.system.progress import log
from holdfast.system.run_claim import RunInUse, claim_run

MOVE_IN_SECONDS = 10.0
CLOSE_SECONDS = 600.0
SLOW_COPY_SECONDS = 60.0
LARGE_SMALL_STATE = 16 << 20
SAVING, PLANNING = "save", "plan"


class Snapshots:
    """See the module's page. `mode`: `node` keeps every node complete, `peer` divides over all nodes and copies to a
    peer node."""

    def __init__(
        self,
        name: str,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        folder: Path | str = ".",
        *,
        interval: int = 1,
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
    ) -> None:
        self.state = State(model, optimizer, replica_group=replica_group, padded_rows=padded_rows)
        self.extra = Extra(extra or {})
        self.folder = Path(folder)
        self.run_memory = RunMemory.of(name, folder, memory)
        self.rank_group = RankGroup(self.run_memory)
        self.stall_seconds = 0.0
        """How long the training waited for snapshots since the last `take` began: metrics call it snapshot_stall_ms."""
        self.copy_seconds = 0.0
        """How long the last copy took, beside the training."""
        self.skipped = 0
        self._shipping: int | None = None
        self._interval, self._layout_note = max(1, interval), dict(layout or {})
        self._shared = dict(shared or {})
        self._retention = (keep_last, keep_every)
        self._settings = {
            "hang_seconds": hang_seconds,
            "kill_hung": kill_hung,
            "mode": mode,
            "nodes": self.rank_group.nodes,
            "here": self.rank_group.here,
        }
        self._copy: Copy | None = None
        self._committed: int | None = None
        self._candidates: tuple[int, ...] = ()
        self._ready, self._sequence, self._step, self._saved = -1, 0, 0, 0
        self._stop_agreed = self._save_waits = self._save_wished = False
        self._plan_heard = self._skipping = False
        self._takes_unasked = 0
        self._resumed: int | None = None
        self._requested: tuple[int, str] | None = None
        """the last save that the keeper was asked for: step, and the start of the run that it comes from"""
        self._keeper = KeeperClient(self.run_memory)
        self.nan_guard = NanGuard(self.folder)
        with self._os_errors_explained():
            self._move_in()
        self._holder = SlotAllocator(self.state, self.rank_group, self.run_memory, mode, self.page)
        self._wishes = StopSignals(self.run_memory.path, listen_to_signals)
        for optimizer in self.state.optimizers:
            _call_before_step(optimizer, self._check_order)

    def _move_in(self) -> None:
        """Claims this rank's desk, refuses if a living process owns it, and makes sure that the node has a keeper."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = BufferedJournal(self.folder / "events.jsonl") if self.rank_group.rank == 0 else None
        self._run_claim: BackgroundLease | None = None
        # The first rank of a node claims before the others: of two starts at once one gets the node, whole.
        for first in (True, False):
            trouble = None
            try:
                if first and self.rank_group.rank == 0 and "HOLDFAST_SUPERVISED" not in os.environ:
                    # The supervisor of `holdfast train` holds the run folder already, for ranks on any host.
                    self._run_claim = self._claim_folder()
                if self.rank_group.first_here is first:
                    self._claim()
            except (HoldfastError, OSError) as error:
                trouble = error
            try:
                agree(trouble, self.rank_group.group)
            except (HoldfastError, OSError) as error:
                self.event("refused", reason=str(error))
                self._give_up_claims()
                raise
        if self.rank_group.first_here:
            for wish in (STOP, SAVE):
                (self.run_memory.path / wish).unlink(missing_ok=True)
            write_json(self.run_memory.path / "settings.json", self._settings)
            for removed in remove_stale(self.run_memory.path.parent.parent, self.run_memory):
                log(f"freed the memory of the run {removed}, which is dead")
            start_keeper(self.run_memory)
        self.rank_group.open_status_pages()
        self._say_last_words_at_the_end()
        self.event(
            "started", world=self.rank_group.world, nodes=len(set(self.rank_group.nodes)), restart=self.page["restarts"]
        )

    def _claim(self) -> None:
        """The ranks of an attempt that was just ended may take a moment to die."""
        deadline = time.monotonic() + MOVE_IN_SECONDS
        while True:
            with self.run_memory.locked():
                self.run_memory.make()
                self.page = RankStatus(self.run_memory.path / status_page_name(self.rank_group.rank))
                if not self.page.owner_alive():
                    self.reached = self.page["step"]
                    """the step that the rank at this desk had reached before"""
                    self.page.claim()
                    return
            if time.monotonic() > deadline:
                raise HoldfastError(
                    f"a run called {self.run_memory.name} with the folder {self.run_memory.folder} is alive already (process "
                    f"{self.page['process']} is its rank {self.rank_group.rank}); end it with `holdfast persist "
                    f"{self.run_memory.folder} --stop`, or choose another name"
                )
            time.sleep(0.05)

    def _claim_folder(self) -> BackgroundLease | None:
        try:
            return claim_run(self.folder, "snapshots")
        except RunInUse:
            raise
        except (HoldfastError, OSError) as error:  # a full disk must not keep a run from its memory
            log(f"warning: {self.folder} cannot be claimed, so a start on another host would not be refused: {error}")
            return None

    def _give_up_claims(self) -> None:
        """What this start claimed before another rank was refused."""
        if self._run_claim is not None:
            self._run_claim.release()
        if hasattr(self, "page") and self.page["process"] == os.getpid():
            self.page["status"] = 0

    @contextmanager
    def _os_errors_explained(self) -> Iterator[None]:
        """A memory or disk that fails is not a defect of the program: the user learns what failed, without a traceback."""
        try:
            yield
        except OSError as error:
            raise HoldfastError(f"no snapshots of {self.run_memory.name} in {self.run_memory.path}: {error}") from error

    def _check_order(self) -> None:
        if self._copy is not None:
            raise HoldfastError(
                f"optimizer.step() was called while the snapshot of step {self._copy.step} is being copied: call "
                "snapshots.commit() after backward() and before optimizer.step(), in every step"
            )

    def _say_last_words_at_the_end(self) -> None:
        """An exception that ends this process is told to the keeper; SIGUSR2 shows where a hung rank stands."""
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.page.set_error_text(f"{kind.__name__}: {error}")
            previous(kind, error, trace)

        sys.excepthook = hook
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            stacks = self.run_memory.path / f"rank-{self.rank_group.rank:05d}.stacks"
            self._stacks = open(stacks, "w", opener=open_private)  # noqa: SIM115
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    def restore(self) -> int:
        """Fills model, optimizer, extra state and random generators from the newest whole state there is; its step, or 0."""
        self._finish_copy()
        self._ready = -1  # steps that are repeated are held as new ones
        self._candidates = ()
        self._shipping = None
        self.page.clear_held()
        self.page["shipped"] = 0
        self.page.beat(1)
        try:
            with self._os_errors_explained():
                found = restore(self)
        except HoldfastError as error:
            self.event("refused", reason=str(error))
            raise
        self._step = found.step
        self._saved = 0 if found.in_place else found.step  # what came from disk is there
        self._resumed, self._requested = found.step, None
        self._committed = found.step if found.in_place else None
        self.page["committed"] = self._committed or 0
        self._sequence = found.sequence
        self._holder.adopt(found.arena)
        self._holder.publish_held()
        self.page["step"] = found.step
        self.page.beat(2)
        return found.step

    def commit(self) -> None:
        """Waits until the last snapshot is whole. Call it after backward and before anything changes the state."""
        begin = time.perf_counter()
        self.page.beat(3)
        self._finish_copy()
        if not self.rank_group.one_node:
            self._tell_the_team()
        self.page.beat(2)
        self.stall_seconds += time.perf_counter() - begin

    def _tell_the_team(self) -> None:
        self._save_wished = self._save_wished or (self.rank_group.first_here and self._wishes.pop_save_request())
        if self.rank_group.start_exchange(self._ready, self._wishes.look() is not None, self._save_wished):
            self._save_wished = False

    def take(self, step: int) -> None:
        """Begins a snapshot of the state as it is after `step` steps; returns at once. A step that is held is not copied anew."""
        self.stall_seconds = 0.0
        begin = time.perf_counter()
        self._step = step
        self.page["step"] = step
        self._gate()
        if self._save_waits:
            self._save_newest()
        if step % self._interval == 0 and step not in (self._ready, self._committed):
            self._begin_copy(step)
        self._look_after_keeper()
        self._takes_unasked += 1
        if self._takes_unasked > 1 and self._wishes.signal is not None:
            self._end_by_signal(self._wishes.signal)
        self.page.beat(2)
        self.stall_seconds += time.perf_counter() - begin

    def _end_by_signal(self, number: int) -> None:
        """The loop never asks `stop_requested`, so the signal does what it would have done without us, once the snapshot is
        whole; the keeper then writes it to disk."""
        self._finish_copy()
        log(
            f"ended by {signal.Signals(number).name} after step {self._step}; the keeper writes this step to {self.folder}"
        )
        self._wishes.close()
        os.kill(os.getpid(), number)

    def save(self, step: int) -> None:
        """Has the keeper write this step to disk, from memory, while training goes on. Collective.

        While an earlier save is still being written the request waits: the newest step is saved as soon as that one is done.
        """
        self._saved = step
        self._finish_copy()
        self._meet(SAVING)
        self._hold(step)
        self._save_newest()

    def _meet(self, purpose: str) -> None:
        """All ranks are here, some to save, some to make a plan: a plan that any of them needs is made first."""
        while True:
            told = self.rank_group.gather([purpose, self._holder.changed()])
            if not any(other == PLANNING or changed for other, changed in told):
                return
            self.rank_group.plan_is_made()
            try:
                with self._os_errors_explained():
                    self._holder.make_plan(self._small_bytes)
            except HoldfastError as error:
                self.event("refused", reason=str(error))
                raise
            if purpose == PLANNING:
                return

    def _hold(self, step: int) -> None:
        """Sees to it that this rank holds the state as it is, after `step` steps, if there is a slot for it."""
        self._finish_copy()
        if self._ready != step:
            self._gate()
            self._begin_copy(step)
            self._finish_copy()

    def _save_newest(self) -> None:
        told = self.rank_group.gather([self._holder.pinned(), self._ready])
        self._save_waits = any(pinned for pinned, _ in told) or len({ready for _, ready in told}) > 1
        if self._save_waits:
            return
        step, token = self._ready, self._pin_for_save(self._ready)
        path = self.run_memory.requests / f"{time.monotonic_ns():020d}-save.json"
        asked = all(
            self.rank_group.gather(token is not None)
        )  # all slots are pinned before any keeper may release them
        try:
            if asked and self.rank_group.first_here:
                request = {"kind": "save", "step": step, "token": token, "retention": self._retention}
                write_json(path, {**request, "resumed": self._resumed})
        except OSError as error:
            asked = False
            self._report("not saved", step, f"the request to the keeper could not be written: {error}")
        if all(self.rank_group.gather(asked)):
            self._requested = (step, str(token))
        else:
            self._holder.pin(step, False)
            path.unlink(missing_ok=True)
            self._save_waits = True

    def _pin_for_save(self, step: int) -> str | None:
        """Pins the slot of this step; the start of the run that its content comes from, or None if it is not held."""
        try:
            found = find_ready(self._holder.arena, step) if self._holder.arena is not None else None
            token = str(found.slot.small_state(found.header)["token"]) if found is not None else None
        except DamagedError:
            return None
        return token if self._holder.pin(step) else None

    def stop_requested(self) -> bool:
        """True on all ranks after the same step, when anybody asked the run to stop. Ask it once per step, after `take`."""
        self._takes_unasked = 0
        if self.rank_group.one_node:
            self._stop_agreed = self.rank_group.stop_here(self._step, self._wishes.look() is not None)
        return self._stop_agreed

    def report_nan(self) -> None:
        """The loss has become NaN or infinite. A state after which two resumed runs met that soon is set aside by `restore`, if
        there is an older one."""
        if self.rank_group.rank == 0:
            self.nan_guard.report(self._step)

    def close(self) -> None:
        """Ends the snapshots of a finished or stopped run. Collective.

        The last step is on disk before the keeper frees the memory. In the `finally` of a loop that an exception ends, the keeper
        writes the newest step that is whole, as after a stop.
        """
        self._finish_copy()
        stopped = self._stop_agreed or sys.exception() is not None
        deadline = time.monotonic() + CLOSE_SECONDS
        unsaved: HoldfastError | None = None
        try:
            if not stopped:
                self._finish_saves(deadline)
        except HoldfastError as error:  # on all ranks
            unsaved = error
        self._holder.close()
        self.page["status"] = STOPPED if stopped else FINISHED
        self.page.beat(6)
        if self._run_claim is not None:
            self._run_claim.release()
        self._wishes.close()
        try:
            if unsaved is not None:
                raise HoldfastError(f"step {self._step} is not on disk: {unsaved}") from unsaved
            if not stopped:
                self._wait_for_keeper(deadline)
            self.event("finished", step=self._step, stopped=stopped, reason=self._wishes.reason, skipped=self.skipped)
        except HoldfastError as error:
            self.event("refused", reason=str(error), step=self._step)
            raise
        finally:
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _finish_saves(self, deadline: float) -> None:
        """The last step is asked to be saved, once the keeper is done with an earlier one."""
        self._keeper.expect_save()
        if self._step not in (0, self._saved):
            self.save(self._step)
        while self._save_waits and all(
            self.rank_group.gather(time.monotonic() < deadline and not self._keeper.has_failed())
        ):
            time.sleep(0.05)
            self._look_after_keeper()
            # A rank that had no slot for the last step would wait for ever for the others to hold what it holds.
            if not self._holder.pinned():
                self._hold(self._step)
            self._save_newest()

    def _wait_for_keeper(self, deadline: float) -> None:
        """Until the last step is on disk; all ranks raise the same error if it is not within the limits."""
        trouble: Exception | None = None
        step, token = self._requested or (self._saved, "")
        if self._save_waits:
            step, token = self._step, ""
        try:
            if self.rank_group.first_here and (self._requested or self._save_waits):
                self._keeper.wait_for_save(step, token, deadline)
            if step != self._step:
                raise HoldfastError(
                    f"step {self._step} is not on disk: it could not be copied to {self.run_memory.path}. Step "
                    f"{step} is the last that was saved to {self.folder}"
                )
        except (HoldfastError, OSError) as error:
            trouble = error
        agree(trouble, self.rank_group.group)

    def event(self, name: str, **details: Any) -> None:
        """One line in the run's events.jsonl, from rank 0."""
        if self._journal is not None:
            self._journal.event(name, **details)

    def _finish_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        while not copy.done.wait(SLOW_COPY_SECONDS):
            log(f"still waiting for the snapshot of step {copy.step} to be copied; is the device or the memory stuck?")
        if copy.trouble:
            self._report("discarded", copy.step, copy.trouble)
        else:
            self._ready, self.copy_seconds = copy.step, copy.seconds
            self._skipping = False

    def _gate(self) -> None:
        """Learns whether everybody holds what this rank held last; after that the older snapshot may be overwritten."""
        self._finish_copy()
        if self.rank_group.one_node and self._ready in (-1, self._committed):
            return
        self.page.beat(5)
        heard = self.rank_group.finish_exchange(self._ready)
        if heard.committed is not None:
            self._committed = self.page["committed"] = heard.committed
        self._candidates, self._plan_heard = heard.candidates, heard.plan
        self._stop_agreed |= heard.stop
        self._save_waits |= heard.save
        if self._holder.copied:
            self._choose_for_peers(heard)

    def _choose_for_peers(self, heard: Exchange) -> None:
        """All nodes copy the same step to their peers, and keep their own of it until all have copied a newer one: what is left
        when a node is lost is of one step. The same on all ranks, since all heard the same."""
        if heard.committed is None or heard.committed < 0 or self._shipping not in (None, heard.shipped):
            return
        copied, self._shipping = self._shipping, heard.committed
        self._holder.keep_for_peers((copied, self._shipping))

    def _begin_copy(self, step: int) -> None:
        self.page.beat(4)
        if not self._plan_fits(step):
            return
        self._sequence += 1
        small, random = self._small_state(), random_state()
        try:
            self._holder.refresh()
            self._copy = self._holder.begin(step, self._sequence, small, random, self._committed, self._candidates)
        except OSError as error:
            self._report("skipped", step, f"{self.run_memory.path}: {error.strerror or error}")
            return
        if self._copy is None:
            late = self.rank_group.late_rank(self._candidates[0]) if self._candidates else None
            self._report(
                "skipped",
                step,
                f"rank {late[0]} does not hold step {self._candidates[0]} yet (its newest is {late[1]})"
                if late is not None
                else "every slot is being written to disk and there is no memory for another",
            )

    def _plan_fits(self, step: int) -> bool:
        """Makes the plan where it is due, on all ranks after the same step; False if this rank must wait for that."""
        due = self.rank_group.plan_due(step) if self.rank_group.one_node else self._plan_heard
        changed = self._holder.changed()
        if self._holder.arena is None or due or (self.rank_group.world == 1 and changed):
            self._meet(PLANNING)
        elif changed:
            self.rank_group.request_plan()
            self._report("skipped", step, "the tensors of this rank changed; all ranks agree on the new ones next")
            return False
        return True

    def _small_bytes(self) -> int:
        size = len(orjson.dumps({**self._small_state(), "random": encode(random_state(), "random state")}))
        if size > LARGE_SMALL_STATE:
            log(
                f"the small state takes {size / 1e6:.0f} MB and is written as JSON at every step: give large tensors (an average "
                "of the weights) as a model beside the model, torch.nn.ModuleDict({'model': ..., 'average': ...}), not as extra"
            )
        return size

    def _small_state(self) -> dict[str, Any]:
        return {
            "extra": self.extra.get(),
            "optimizer": self.state.optimizer_settings(),
            "padded_rows": self.state.padded_rows,
            "layout": self._layout_note,
            "shared": self._shared,
            "world": self.rank_group.world,
            "here": self.rank_group.here,
            **self._holder.plan,
        }

    def _look_after_keeper(self) -> None:
        """A keeper that died or hangs is replaced; the new one finds everything where it was."""
        if self.rank_group.first_here:
            self._keeper.check()

    def _report(self, what: str, step: int, reason: str) -> None:
        self.skipped += 1
        self.page["skipped"], self.page["given_up"] = self.skipped, step
        if not self._skipping:  # the first of many in a row
            log(f"snapshot of step {step} {what}: {reason}")
            self.event("snapshot", step=step, outcome=what, reason=reason)
        self._skipping = True


def _call_before_step(optimizer: Any, check: Callable[[], None]) -> None:
    """Has an optimizer, or the one inside a wrapper such as Accelerate's, call `check` before each step."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    optimizer.register_step_pre_hook(lambda *_: check())
