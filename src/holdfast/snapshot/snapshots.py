"""`Snapshots`: the run's whole state in CPU memory at every step, for any training loop.

    snapshots = Snapshots("my-run", model=model, optimizer=optimizer, extra={"scheduler": scheduler}, folder="runs/my-run")
    step = snapshots.restore()              # 0 on a fresh start
    while step < steps:
        forward_backward(...)
        snapshots.commit()                  # the last snapshot is whole before anything changes the state
        optimizer.step(); step += 1
        snapshots.take(step)                # returns at once; copies while the next step computes
    snapshots.close()

The invariants: a slot is overwritten only when it does not hold the newest step that every rank has; so a crash at any
instant leaves one common, whole step. Nothing here stops the training for want of memory or disk: a snapshot that cannot
be taken is counted and reported.
"""

import faulthandler
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import torch
import torch.distributed as dist

from holdfast.checkpoint.collective import agree
from holdfast.checkpoint.state import State
from holdfast.errors import HoldfastError
from holdfast.journal import PatientJournal
from holdfast.progress import say
from holdfast.snapshot.copying import Copy
from holdfast.snapshot.desk import FINISHED, STOPPED, Desk, desk_name
from holdfast.snapshot.holder import Holder
from holdfast.snapshot.place import MEMORY, Place, keeper_alive, remove_stale, write_json
from holdfast.snapshot.quarantine import Quarantine
from holdfast.snapshot.resume import restore
from holdfast.snapshot.smallstate import Extra, encode, random_state
from holdfast.snapshot.starting import start_keeper
from holdfast.snapshot.team import Heard, Team
from holdfast.snapshot.wishes import SAVE, STOP, Wishes

KEEPER_CHECK_SECONDS = 2.0
MOVE_IN_SECONDS = 10.0
CLOSE_SECONDS = 600.0
LARGE_SMALL_STATE = 16 << 20


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
        self.place = Place.of(name, folder, memory)
        self.team = Team(self.place)
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
            "nodes": self.team.nodes,
            "here": self.team.here,
        }
        self._journal = PatientJournal(self.folder / "events.jsonl") if self.team.rank == 0 else None
        self._holder = Holder(self.state, self.team, self.place, mode, self._on_ready)
        self._copy: Copy | None = None
        self._committed: int | None = None
        self._ready, self._sequence, self._step = -1, 0, 0
        self._stop_agreed = self._save_waits = self._save_wished = False
        self._last_keeper_check = 0.0
        self.quarantine = Quarantine(self.folder)
        self._move_in()
        self._wishes = Wishes(self.place.path, listen_to_signals)

    def _move_in(self) -> None:
        """Takes this rank's desk, refuses if somebody sits there, and sees to it that the node has a keeper."""
        trouble: HoldfastError | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.place.make()
        self.desk = Desk(self.place.path / desk_name(self.team.rank))
        self.reached = self.desk["step"]
        """the step that the rank at this desk had reached before"""
        deadline = time.monotonic() + MOVE_IN_SECONDS
        while self.desk.occupied() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.desk.occupied():
            trouble = HoldfastError(
                f"a run called {self.place.name} with the folder {self.place.folder} is alive already (process "
                f"{self.desk['process']} is its rank {self.team.rank}); stop it or choose another name"
            )
        try:
            agree(trouble, self.team.group)
        except HoldfastError as error:
            self.event("refused", reason=str(error))
            raise
        self.desk.sit_down()
        if self.team.first_here:
            for wish in (STOP, SAVE):
                (self.place.path / wish).unlink(missing_ok=True)
            write_json(self.place.path / "settings.json", self._settings)
            for removed in remove_stale(self.place.path.parent.parent, self.place):
                say(f"freed the memory of the run {removed}, which is dead")
            start_keeper(self.place)
        self.team.meet()
        self._say_last_words_at_the_end()
        self.event("started", world=self.team.world, nodes=len(set(self.team.nodes)), restart=self.desk["restarts"])

    def _say_last_words_at_the_end(self) -> None:
        """An exception that ends this process is told to the keeper; SIGUSR2 shows where a hung rank stands."""
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.desk.say_last_words(f"{kind.__name__}: {error}")
            previous(kind, error, trace)

        sys.excepthook = hook
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            self._stacks = open(self.place.path / f"rank-{self.team.rank:05d}.stacks", "w")  # noqa: SIM115
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    def restore(self) -> int:
        """Fills model, optimizer, extra state and random generators from the newest whole state there is; its step, or 0."""
        self._finish_copy()
        self._ready = -1  # what is done anew is held anew
        self._shipping = None
        self.desk["shipped"] = 0
        self.desk.beat(1)
        try:
            found = restore(self)
        except HoldfastError as error:
            self.event("refused", reason=str(error))
            raise
        self._step = found.step
        self._committed = found.step if found.in_place else None
        self._sequence = found.sequence
        self._holder.adopt(found.arena)
        self.desk["step"] = found.step
        self.desk.beat(2)
        return found.step

    def commit(self) -> None:
        """Waits until the last snapshot is whole. Call it after backward and before anything changes the state."""
        begin = time.perf_counter()
        self.desk.beat(3)
        self._finish_copy()
        if not self.team.one_node:
            self._tell_the_team()
        self.desk.beat(2)
        self.stall_seconds += time.perf_counter() - begin

    def _tell_the_team(self) -> None:
        self._save_wished = self._save_wished or (self.team.first_here and self._wishes.take_save())
        if self.team.announce(self._ready, self._wishes.look() is not None, self._save_wished):
            self._save_wished = False

    def take(self, step: int) -> None:
        """Begins a snapshot of the state as it is after `step` steps; returns at once. A step that is held is not copied anew."""
        self.stall_seconds = 0.0
        begin = time.perf_counter()
        self._step = step
        self.desk["step"] = step
        self._gate()
        if self._save_waits:
            self._save_newest()
        if step % self._interval == 0 and step not in (self._ready, self._committed):
            self._begin_copy(step)
        self._look_after_keeper()
        self.desk.beat(2)
        self.stall_seconds += time.perf_counter() - begin

    def save(self, step: int) -> None:
        """Has the keeper write this step to disk, from memory, while training goes on. Collective.

        While an earlier save is still being written the request waits: the newest step is saved as soon as that one is done.
        """
        self._hold(step)
        self._save_newest()

    def _hold(self, step: int) -> None:
        """Sees to it that this rank holds the state as it is, after `step` steps, if there is a slot for it."""
        self._finish_copy()
        if self._ready != step:
            self._gate()
            self._begin_copy(step)
            self._finish_copy()

    def _save_newest(self) -> None:
        told = self.team.gather([self._holder.pinned(), self._ready])
        self._save_waits = any(pinned for pinned, _ in told) or len({ready for _, ready in told}) > 1
        if self._save_waits:
            return
        step = self._ready
        if self._holder.pin(step) and self.team.first_here:
            request = {"kind": "save", "step": step, "retention": self._retention}
            write_json(self.place.requests / f"{time.time_ns():020d}-save.json", request)

    def stop_requested(self) -> bool:
        """True on all ranks after the same step, when anybody asked the run to stop. Ask it once per step, after `take`."""
        if self.team.one_node:
            self._stop_agreed = self.team.stop_here(self._step, self._wishes.look() is not None)
        return self._stop_agreed

    def report_nan(self) -> None:
        """The loss has become NaN or infinite. A snapshot that two resumed runs ended so from is set aside by `restore`."""
        if self.team.rank == 0:
            self.quarantine.count()

    def close(self) -> None:
        """Ends the snapshots of a finished or stopped run. Saves asked for are on disk before the keeper frees the memory."""
        self._finish_copy()
        while self._save_waits and all(self.team.gather(keeper_alive(self.place))):
            time.sleep(0.05)
            # A rank that had no slot for the last step would wait for ever for the others to hold what it holds.
            if not self._holder.pinned():
                self._hold(self._step)
            self._save_newest()
        stopped = self._stop_agreed
        self._holder.close()
        self.desk["status"] = STOPPED if stopped else FINISHED
        self.desk.beat(6)
        self._wishes.close()
        self.event("finished", step=self._step, stopped=stopped, reason=self._wishes.reason, skipped=self.skipped)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self.team.first_here and not stopped:
            self._wait_for_keeper()

    def _wait_for_keeper(self) -> None:
        """Until what was asked to be saved is on disk. A disk that stays full must not hold the job for ever: memory is kept."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.place.path.exists() and keeper_alive(self.place):
            if time.monotonic() > deadline:
                say(
                    f"the keeper is still writing to {self.folder}; it goes on by itself (see {self.place.path}/keeper.log)"
                )
                return
            time.sleep(0.02)

    def event(self, name: str, **details: Any) -> None:
        """One line in the run's events.jsonl, from rank 0."""
        if self._journal is not None:
            self._journal.event(name, **details)

    def _finish_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        copy.done.wait()
        if copy.trouble:
            self._report("discarded", copy.step, copy.trouble)
        else:
            self._ready, self.copy_seconds = copy.step, copy.seconds

    def _gate(self) -> None:
        """Learns whether everybody holds what this rank held last; after that the older snapshot may be overwritten."""
        self._finish_copy()
        if self.team.one_node and self._ready in (-1, self._committed):
            return
        self.desk.beat(5)
        heard = self.team.hear(self._ready)
        self._committed = heard.committed if heard.committed is not None else self._committed
        self._stop_agreed |= heard.stop
        self._save_waits |= heard.save
        if self._holder.copied:
            self._choose_for_peers(heard)

    def _choose_for_peers(self, heard: Heard) -> None:
        """All nodes copy the same step to their peers, and keep their own of it until all have copied a newer one: what is left
        when a node is lost is of one step. The same on all ranks, since all heard the same."""
        if heard.committed is None or heard.committed < 0 or self._shipping not in (None, heard.shipped):
            return
        copied, self._shipping = self._shipping, heard.committed
        self._holder.keep_for_peers((copied, self._shipping))

    def _begin_copy(self, step: int) -> None:
        self.desk.beat(4)
        try:
            self._holder.prepare(self._small_bytes)
        except HoldfastError as error:
            self.event("refused", reason=str(error))
            raise
        self._sequence += 1
        small, random = self._small_state(), random_state()
        self._copy = self._holder.begin(step, self._sequence, small, random, self._committed)
        if self._copy is None:
            self._report("skipped", step, "every slot is being written to disk and there is no memory for another")

    def _on_ready(self, step: int) -> None:
        self.desk["ready"] = step

    def _small_bytes(self) -> int:
        size = len(orjson.dumps({**self._small_state(), "random": encode(random_state(), "random state")}))
        if size > LARGE_SMALL_STATE:
            say(
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
            "world": self.team.world,
            "here": self.team.here,
            **self._holder.plan,
        }

    def _look_after_keeper(self) -> None:
        """A keeper that died is replaced; the new one finds everything where it was."""
        now = time.monotonic()
        if self.team.first_here and now - self._last_keeper_check > KEEPER_CHECK_SECONDS:
            self._last_keeper_check = now
            if not keeper_alive(self.place):
                start_keeper(self.place)

    def _report(self, what: str, step: int, reason: str) -> None:
        self.skipped += 1
        self.desk["skipped"] = self.skipped
        say(f"snapshot of step {step} {what}: {reason}")
        self.event("snapshot", step=step, outcome=what, reason=reason)
