"""The keeper's save requests, from the request to the checkpoint on disk.

The invariants: a request comes from a file or follows from the state of the ranks, so a new keeper finds it again, and a step
that is on disk already counts as written. A failed save is tried again, and the state stays in memory, until it succeeds or a
newer step is on disk.
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.checkpoint.folder import LATEST, checkpoints_in, latest_name, point_latest, shared_temporary
from holdfast.snapshot.keeper.agreement import StepAgreement
from holdfast.snapshot.keeper.checkpoint_writer import (
    all_passed,
    is_published,
    retain_after,
    start_token,
    write_checkpoint,
)
from holdfast.snapshot.keeper.failed_saves import clear_failed_save, record_failed_save
from holdfast.snapshot.keeper.requests import FROM_PEER, LAST, SaveRequest
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.ready_slot import OvertakenError, common_steps, find_ready, newest_generation
from holdfast.snapshot.memory.run_memory import RunMemory, opened_arenas, read_json, write_json
from holdfast.snapshot.memory.slot import DamagedError
from holdfast.snapshot.memory.slot_pins import pinned, release_save
from holdfast.snapshot.ranks.status_page import FINISHED, RankStatus
from holdfast.snapshot.ranks.stop_signals import SAVE, STOP, TRIGGERS
from holdfast.system.atomic_files import remove_temporaries
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal

RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 60.0
COPY_SECONDS = 60.0
"""how long to wait for a step that ranks may still be copying"""
AGREEMENT_SECONDS, FINAL_AGREEMENT_SECONDS = 15.0, 5.0
"""how long to wait for the proposals of other nodes; the second one when the scheduler ends this node"""
PEER_WRITE_SECONDS = 15.0
"""how long the keepers of several nodes wait for one that writes no heartbeat while they write a step"""


@contextlib.contextmanager
def node_arenas(run_memory: RunMemory) -> Iterator[list[Arena]]:
    """Opens the arenas of this node that have the newest plan; removes those of older plans once these hold a whole step."""
    with opened_arenas(run_memory.arenas(), run_memory.key) as opened:
        newest = newest_generation(opened)
        for arena in opened:
            if newest and arena.generation < newest[0].generation and common_steps(newest):
                arena.path.unlink(missing_ok=True)
        yield newest


class SaveQueue:
    def __init__(self, run_memory: RunMemory, journal: Journal, report_error: Callable[[str], None]) -> None:
        self.agreement = StepAgreement(run_memory.folder / "checkpoints", run_memory.node)
        self.pages: dict[int, RankStatus] = {}
        """The status pages of the ranks of this node."""
        self.ending = False
        """The scheduler ends this node: waits are short."""
        self._run_memory, self._journal, self._report_error = run_memory, journal, report_error
        self._requests: list[SaveRequest] = []
        self._written: dict[int, float] = {}
        """Steps that this process wrote, and when."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, reason: str) -> SaveRequest:
        request = SaveRequest(reason)
        self._requests.append(request)
        return request

    def read(self) -> None:
        """Adds what is new: trigger files in the run folder, files in the run's memory, proposals of other nodes."""
        for name in TRIGGERS:
            trigger = self._run_memory.folder / name
            if trigger.exists() and not any(request.trigger == trigger for request in self._requests):
                self._stop_run(name)
                self._requests.append(SaveRequest(name, trigger=trigger, stop=True))
        self._read_files()
        with contextlib.suppress(OSError):  # a disk that fails now is read again in the next round
            if self.agreement.poll(busy=any(request.proposal for request in self._requests)):
                self.add(FROM_PEER)

    def _read_files(self) -> None:
        known = {request.file for request in self._requests}
        for path in sorted(self._run_memory.requests.glob("*.json")):
            if path.name in known or path.name.endswith(".answer.json"):
                continue
            record = read_json(path)
            if record is None:
                continue
            request = SaveRequest.from_file(path.name, record)
            if request.stop:
                self._stop_run("persist --stop")
            self._requests.append(request)
            if request.reason == "save":
                for other in self._requests:
                    if other.save_requested:
                        other.save = other.save or request

    def _stop_run(self, reason: str) -> None:
        stop = self._run_memory.path / STOP
        stop.touch()
        with contextlib.suppress(OSError):  # full memory: the ranks stop without the reason
            stop.write_text(reason, encoding="utf-8")

    def work(self) -> None:
        """Attempts every request that is due, once."""
        for request in list(self._requests):
            if request.not_before > time.monotonic():
                continue
            try:
                with node_arenas(self._run_memory) as arenas:
                    self._attempt(request, arenas)
            except (HoldfastError, OSError) as error:
                self._retry(request, str(error))

    def write_last(self) -> bool:
        """Whether the newest common step is on disk, or there is none; attempts to write it."""
        request = next((one for one in self._requests if one.reason == LAST), None) or self.add(LAST)
        self.work()
        return request not in self._requests

    def drop_after_end(self) -> None:
        """The run is finished: what an earlier crash left to write may need nodes that have ended."""
        for request in list(self._requests):
            if request.step is None and request.reason != LAST:
                self._finish(request, None, "the run has ended")

    def _retry(self, request: SaveRequest, error: str) -> None:
        request.tries += 1
        request.error = error
        request.reset_agreement()
        self._journal.event("refused", reason=error, step=request.step, tries=request.tries)
        if request.wants_answer:
            self._finish(request, None, error)
        elif self._superseded(request):
            self._finish(request, None, f"{error}; step {max(self._written)} is on disk instead")
        else:
            retry_seconds = min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * request.tries)
            request.not_before = time.monotonic() + retry_seconds
            record_failed_save(self._run_memory, request.step, error, retry_seconds)
            self._report_error(f"{request.reason}: {error}; memory is kept, trying again")

    def _superseded(self, request: SaveRequest) -> bool:
        """Whether a newer step was written since the request. Of several nodes, one may be the only one with the request: its
        ranks wrote theirs, and those of another node were killed first."""
        step = request.step
        return step is not None and any(new > step and at > request.since for new, at in self._written.items())

    def _attempt(self, request: SaveRequest, arenas: list[Arena]) -> None:
        """One attempt; a request that waits, or needs an older step, stays in the queue for the next round."""
        if self._left_to_ranks(request):
            return
        steps = [step for step in common_steps(arenas) if step not in request.damaged]
        newest = request.step if request.step is not None else max(steps, default=-1)
        token = request.token or start_token(arenas, newest)
        saved = dict(checkpoints_in(self._run_memory.folder)).get(newest)
        # It may be of an earlier start of the run, or an earlier keeper may have written it.
        if saved is not None and token is not None and is_published(saved, token):
            self._complete_publication(request, saved, newest, token, arenas)
            self._finish(request, saved, None)
            return
        step, wait = self._choose_step(request, arenas, steps)
        if wait:
            return
        if step is None:
            self._finish(request, None, f"no step is held whole in memory (requested: {request.step or 'the newest'})")
            return
        try:
            self._finish(request, self._write(request, arenas, step), None)
        except OvertakenError:
            request.reset_agreement()  # there is a newer one
        except DamagedError as error:
            self._journal.event("snapshot", step=step, outcome="damaged", reason=str(error))
            request.damaged.append(step)
            request.reset_agreement()

    def _choose_step(self, request: SaveRequest, arenas: list[Arena], steps: list[int]) -> tuple[int | None, bool]:
        """The step to write, None if there is none; and whether to look again in the next round."""
        if request.step is not None:
            if request.step in steps:
                return request.step, False
            lost = request.step in request.damaged or all_passed(arenas, request.step)
            return None, not lost and time.monotonic() - request.since <= COPY_SECONDS
        if not steps:
            return None, self._step_may_come(request)
        if not self.agreement.multi_node:
            return steps[0], False
        request.proposal = request.proposal or secrets.token_hex(8)
        step = self.agreement.agree(request.proposal, steps)
        if step is None and not self._is_solo(request):
            return None, True
        return (steps[0] if step is None and request.reason != FROM_PEER else step), False

    def _complete_publication(
        self, request: SaveRequest, saved: Path, step: int, token: str, arenas: list[Arena]
    ) -> None:
        """What may be missing after a checkpoint has its name: `latest`, retention, and the end of its temporary folder."""
        owner = any(arena.rank == 0 for arena in arenas)
        if owner:  # the keeper of another node that writes `latest` now tries again
            remove_temporaries(saved.with_name(LATEST))
            shutil.rmtree(shared_temporary(saved.parent, step, token), ignore_errors=True)
        if latest_name(saved.parent) != saved.name and step >= max(self._written, default=step):
            point_latest(saved)
        if owner:
            retain_after(step, saved.parent, request.retention, (request.resumed, self._written))

    def _left_to_ranks(self, request: SaveRequest) -> bool:
        """Several nodes that train: each keeper sees another step as the newest. So the ranks choose the step: the last one where
        they are to stop, and a save where they continue."""
        if not self.agreement.multi_node:
            return False
        if request.save is not None:
            if request.save in self._requests and not request.save.tries:
                return True
            path = dict(checkpoints_in(self._run_memory.folder)).get(request.save.step or 0)
            error = None if path else request.save.error or f"step {request.save.step} was not saved"
            self._finish(request, path, error)
            return True
        # `drop_after_end` follows; the other nodes, which may have ended, would leave a proposal behind.
        if request.step is None and request.reason != LAST and self._is_finishing():
            return True
        if request.stop:
            return self._step_may_come(request)
        training = all(page.owner_alive() for page in self.pages.values())
        if request.reason in ("persist", "died") and training and self._step_may_come(request):
            if not request.save_requested:
                request.save_requested = True
                (self._run_memory.path / SAVE).touch()
            return True
        return False

    def _is_finishing(self) -> bool:
        """Whether the ranks of this node reach the end of the run, some of them before the others."""
        pages = self.pages.values()
        finished = [page["status"] == FINISHED for page in pages]
        return any(finished) and all(done or page.owner_alive() for done, page in zip(finished, pages, strict=True))

    def _is_solo(self, request: SaveRequest) -> bool:
        """Whether the other nodes had time enough to make a proposal; from then on each node writes by itself."""
        request.waiting_since = request.waiting_since or time.monotonic()
        limit = FINAL_AGREEMENT_SECONDS if self.ending else AGREEMENT_SECONDS
        if time.monotonic() - request.waiting_since > limit and not request.solo:
            self.agreement.withdraw(request.proposal)
            request.solo = True
        return request.solo

    def _step_may_come(self, request: SaveRequest) -> bool:
        """Whether to look again for a step that all ranks hold: while they train, they may still be copying the first one."""
        alive = any(page.owner_alive() for page in self.pages.values())
        return alive and time.monotonic() - request.since < COPY_SECONDS

    def _write(self, request: SaveRequest, arenas: list[Arena], step: int) -> Path:
        begin = time.perf_counter()
        slots = [found for arena in arenas if (found := find_ready(arena, step))]
        checkpoints, kept = self._run_memory.folder / "checkpoints", (request.resumed, self._written)
        with pinned(slots):
            path = write_checkpoint(
                arenas, step, checkpoints, request.retention, PEER_WRITE_SECONDS, request.solo, kept
            )
        self._written[step] = time.monotonic()
        clear_failed_save(self._run_memory)
        if arenas[0].rank == 0:  # one event per checkpoint, however many nodes wrote it
            seconds = round(time.perf_counter() - begin, 4)
            size = sum(file.stat().st_size for file in path.iterdir())
            facts = {"path": str(path), "reason": request.reason, "bytes": size, "seconds": seconds}
            self._journal.event("persisted", step=step, **facts)
        return path

    def _finish(self, request: SaveRequest, path: Path | None, error: str | None) -> None:
        if error:
            self._report_error(f"{request.reason}: {error}")
            if request.reason == "save" and not self._superseded(request):
                record_failed_save(self._run_memory, request.step, error, None)
        if request.reason == "save" and request.step is not None:
            release_save(self._run_memory, request.step)
        if request.file:
            if request.wants_answer:
                answer = {"path": str(path) if path else None, "trouble": error}
                write_json(self._run_memory.requests / request.file.replace(".json", ".answer.json"), answer)
            (self._run_memory.requests / request.file).unlink(missing_ok=True)
        if request.trigger and path is not None:
            request.trigger.unlink(missing_ok=True)
        self._requests.remove(request)
