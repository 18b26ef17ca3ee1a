"""The keeper: one small process per node and run, outside the trainers' session. It watches, verifies, writes to disk and frees.

    python -m holdfast.snapshot.keeper.service /dev/shm/holdfast-0/RUN-KEY

The invariants: all it knows is in the run's memory folder, so a keeper that is killed is replaced by one that goes on from there
(what it had pinned for itself is released, requests are read again, and a step that is on disk already counts as written); it
removes only that folder, and only when no rank is alive and the newest whole step in it is on disk. A round that fails is
reported and tried again: no error of disk, memory or network ends the keeper. No torch is imported.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import LATEST, checkpoints_in, point_latest
from holdfast.checkpoint.folder import remove_dead_temporaries as remove_unfinished_checkpoints
from holdfast.snapshot.keeper.checkpoint_writer import (
    all_passed,
    is_published,
    retain_after,
    start_token,
    write_checkpoint,
)
from holdfast.snapshot.keeper.failed_saves import clear_failed_save, record_failed_save
from holdfast.snapshot.keeper.partners import Partners
from holdfast.snapshot.keeper.rank_watch import RankWatch
from holdfast.snapshot.keeper.requests import INVITED, LAST, SaveRequest
from holdfast.snapshot.keeper.status import claim_status
from holdfast.snapshot.memory.arena import Arena, DamagedError
from holdfast.snapshot.memory.ready_slot import OvertakenError, common_steps, find_ready, newest_generation
from holdfast.snapshot.memory.run_memory import (
    SERVE,
    RunMemory,
    lock_keeper,
    open_arenas,
    read_json,
    remove_dead_temporaries,
    write_json,
)
from holdfast.snapshot.memory.slot_pins import pinned, release_killed_keepers, release_save
from holdfast.snapshot.ranks.status_page import FINISHED, STOPPED, RankStatus
from holdfast.snapshot.ranks.stop_signals import SAVE, STOP, TRIGGERS
from holdfast.system.atomic_files import remove_temporaries
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import BufferedJournal

ROUND_SECONDS = 0.05
LINGER_SECONDS = 600.0
VERIFY_SECONDS = 5.0
RETRY_SECONDS = 5.0
LISTEN_SECONDS = 10.0
SAVE_PATIENCE = 60.0
MEETING_PATIENCE, MEETING_PATIENCE_AT_THE_END = 15.0, 5.0
ENDING_SECONDS = 20.0
WRITE_SECONDS = 15.0
"""how long the keepers of several nodes wait for one that shows no life while they write a step"""


class Keeper:
    def __init__(self, run_memory: RunMemory, status: RankStatus) -> None:
        self.run_memory, self._status = run_memory, status
        self.journal = BufferedJournal(run_memory.folder / "events.jsonl")
        self.settings: dict[str, Any] = {}
        self._jobs: list[SaveRequest] = []
        self._ranks = RankWatch(run_memory, self.journal)
        self._written: set[int] = set()
        self._next_verify = self._next_listen = 0.0
        self._dead_since: float | None = None
        self._ending = False
        signal.signal(signal.SIGTERM, self._end)
        self._peers: Any = None
        self._partners = Partners(run_memory)

    def _end(self, *_: Any) -> None:
        self._ending = True

    def run(self) -> None:
        recovered = False
        while self.run_memory.path.exists():
            try:
                if not recovered:
                    self._release_killed_keeper()
                    recovered = True
                if self._round():
                    return
            except (HoldfastError, OSError) as error:
                self._report_error(f"{type(error).__name__}: {error}; trying again")
                time.sleep(1.0)
            time.sleep(ROUND_SECONDS)

    def _release_killed_keeper(self) -> None:
        """What a killed keeper left: pins, its record of a failed save, a checkpoint that it wrote or removed."""
        release_killed_keepers(self.run_memory)
        clear_failed_save(self.run_memory)
        remove_unfinished_checkpoints(self.run_memory.folder / "checkpoints")

    def _round(self) -> bool:
        """Looks at everything once; True when the run has ended and its memory is freed."""
        self.settings = read_json(self.run_memory.path / "settings.json") or self.settings
        self._partners.nodes = list(dict.fromkeys(self.settings.get("nodes", [])))
        self._exchange_with_peers()
        pages = self._pages()
        self._jobs += [SaveRequest(kind) for kind in self._ranks.look(pages, self.settings)]
        self._take_triggers()
        self._take_requests()
        self._take_invitations()
        self._work_on_jobs()
        self._verify()
        return self._over(pages)

    def _report_error(self, message: str) -> None:
        """In the log, and on the status page for the trainer; the same one only once."""
        if message != self._status.error_text:
            self._status.set_error_text(message)
            print(message, flush=True)

    def _pages(self) -> dict[int, RankStatus]:
        here = self.settings.get("here", [])
        return {rank: page for rank, page in self.run_memory.pages().items() if rank in here}

    def arenas(self) -> list[Arena]:
        """The arenas of this node that count now; those of an older division go once the newer one holds a whole step."""
        opened = open_arenas(self.run_memory.arenas(), self.run_memory.key)
        chosen = newest_generation(opened)
        for arena in opened:
            if arena not in chosen:
                if chosen and arena.generation < chosen[0].generation and common_steps(chosen):
                    arena.path.unlink(missing_ok=True)
                arena.close()
        return chosen

    def _take_triggers(self) -> None:
        """The files `persist` and `error.txt` in the run folder: persist what is held, and stop the run."""
        for name in TRIGGERS:
            trigger = self.run_memory.folder / name
            if trigger.exists() and not any(job.trigger == trigger for job in self._jobs):
                (self.run_memory.path / STOP).write_text(name)
                self._jobs.append(SaveRequest(name, trigger=trigger, stop=True))

    def _take_requests(self) -> None:
        known = {job.request for job in self._jobs}
        for path in sorted(self.run_memory.requests.glob("*.json")):
            if path.name in known or path.name.endswith(".answer.json"):
                continue
            record = read_json(path)
            if record is None:
                continue
            job = SaveRequest.of_request(path.name, record)
            if job.stop:
                (self.run_memory.path / STOP).write_text("persist --stop")
            self._jobs.append(job)
            if job.reason == "save":
                for other in self._jobs:
                    if other.save_requested:
                        other.save = other.save or job

    def _take_invitations(self) -> None:
        """Several nodes: the keeper of another one wants a step written."""
        with contextlib.suppress(OSError):  # the disk will be there again
            if self._partners.call(busy=any(job.stamp for job in self._jobs)):
                self._jobs.append(SaveRequest(INVITED))

    def _work_on_jobs(self) -> None:
        for job in list(self._jobs):
            if job.not_before > time.monotonic():
                continue
            arenas = self.arenas()
            try:
                self._do(job, arenas)
            except (HoldfastError, OSError) as error:
                job.tries += 1
                retry_seconds = min(60.0, RETRY_SECONDS * job.tries)
                job.not_before = time.monotonic() + retry_seconds
                job.trouble = str(error)
                job.ask_anew()
                self.journal.event("refused", reason=str(error), step=job.step, tries=job.tries)
                record_failed_save(self.run_memory, job.step, str(error), retry_seconds)
                self._report_error(f"{job.reason}: {error}; memory is kept, trying again")
                if job.answers:
                    self._finish(job, None, str(error))
            finally:
                for arena in arenas:
                    arena.close()

    def _do(self, job: SaveRequest, arenas: list[Arena]) -> None:
        """One attempt; a job that waits, or has to try an older step, is there again in the next round."""
        if self._trainers_see_to_it(job):
            return
        steps = [step for step in common_steps(arenas) if step not in job.damaged]
        step = steps[0] if steps else None
        saved = self._saved(job, arenas, job.step if job.step is not None else step)
        if saved is not None:
            if job.step is not None:
                if not self._partners.several:  # else another node may be writing it
                    remove_temporaries(saved.with_name(LATEST))
                point_latest(saved)
                if any(arena.rank == 0 for arena in arenas):
                    retain_after(job.step, saved.parent, job.retention, (job.resumed, self._written))
            self._finish(job, saved, None)
            return
        if job.step is not None:
            step = job.step if job.step in steps else None
            waited = time.monotonic() - job.since > SAVE_PATIENCE or all_passed(arenas, job.step)
            if step is None and job.step not in job.damaged and not waited:
                return  # some rank is still copying
        elif step is None and self._may_still_come(job):
            return
        elif step is not None and self._partners.several:
            step = self._partners.agree(job, steps)
            if step is None:
                if not self._left_alone(job):
                    return
                step = steps[0] if job.reason != INVITED else None
        if step is None:
            self._finish(job, None, f"no step is held whole in memory (asked for: {job.step or 'the newest'})")
        else:
            try:
                self._finish(job, self._write(job, arenas, step), None)
            except OvertakenError:
                job.ask_anew()  # there is a newer one
            except DamagedError as error:
                self.journal.event("snapshot", step=step, outcome="damaged", reason=str(error))
                job.damaged.append(step)
                job.ask_anew()

    def _saved(self, job: SaveRequest, arenas: list[Arena], step: int | None) -> Path | None:
        """The checkpoint of this step, if it comes from the same start of the run: an earlier keeper may have written it."""
        path = dict(checkpoints_in(self.run_memory.folder)).get(-1 if step is None else step)
        token = job.token or start_token(arenas, -1 if step is None else step)
        return path if path is not None and token is not None and is_published(path, token) else None

    def _trainers_see_to_it(self, job: SaveRequest) -> bool:
        """Several nodes that train: each keeper sees another step as the newest. So what is to be written is left to the ranks,
        who agree on a step: the last one where they are to stop, and a save where they go on."""
        if not self._partners.several:
            return False
        if job.stop:
            return self._may_still_come(job)
        if job.save is not None:
            if job.save in self._jobs and not job.save.tries:
                return True
            path = dict(checkpoints_in(self.run_memory.folder)).get(job.save.step or 0)
            self._finish(job, path, None if path else job.save.trouble or f"step {job.save.step} was not saved")
            return True
        train = all(page.owner_alive() for page in self._pages().values())
        if job.reason in ("persist", "died") and train and self._may_still_come(job):
            if not job.save_requested:
                job.save_requested = True
                (self.run_memory.path / SAVE).touch()
            return True
        return False

    def _left_alone(self, job: SaveRequest) -> bool:
        """Whether the other nodes were waited for long enough; from then on each goes its own way."""
        job.met = job.met or time.monotonic()
        patience = MEETING_PATIENCE if not self._ending else MEETING_PATIENCE_AT_THE_END
        if time.monotonic() - job.met > patience and not job.alone:
            self._partners.leave(job)
            job.alone = True
        return job.alone

    def _may_still_come(self, job: SaveRequest) -> bool:
        """Whether to look again for a step that all ranks hold: while they train, the first one may be on its way."""
        alive = any(page.owner_alive() for page in self._pages().values())
        return alive and time.monotonic() - job.since < SAVE_PATIENCE

    def _write(self, job: SaveRequest, arenas: list[Arena], step: int) -> Path:
        begin = time.perf_counter()
        slots = [found for arena in arenas if (found := find_ready(arena, step))]
        with pinned(slots):
            checkpoints, kept = self.run_memory.folder / "checkpoints", (job.resumed, self._written)
            path = write_checkpoint(arenas, step, checkpoints, job.retention, WRITE_SECONDS, job.alone, kept)
        self._written.add(step)
        clear_failed_save(self.run_memory)
        if arenas[0].rank == 0:  # one word per checkpoint, however many nodes wrote it
            seconds = round(time.perf_counter() - begin, 4)
            size = sum(file.stat().st_size for file in path.iterdir())
            self.journal.event("persisted", step=step, path=str(path), reason=job.reason, bytes=size, seconds=seconds)
        return path

    def _finish(self, job: SaveRequest, path: Path | None, trouble: str | None) -> None:
        if trouble:
            self._report_error(f"{job.reason}: {trouble}")
            if job.reason == "save":
                record_failed_save(self.run_memory, job.step, trouble, None)
        if job.reason == "save" and job.step is not None:
            release_save(self.run_memory, job.step)
        if job.request:
            if job.answers:
                answer = {"path": str(path) if path else None, "trouble": trouble}
                write_json(self.run_memory.requests / job.request.replace(".json", ".answer.json"), answer)
            (self.run_memory.requests / job.request).unlink(missing_ok=True)
        if job.trigger and path is not None:
            job.trigger.unlink(missing_ok=True)
        self._jobs.remove(job)

    def _verify(self) -> None:
        """Now and then, at most a twentieth of the time: the newest common step is compared with its row sums."""
        if time.monotonic() < self._next_verify:
            return
        begin = time.monotonic()
        remove_dead_temporaries(self.run_memory)
        arenas = self.arenas()
        for step in common_steps(arenas)[:1]:
            for found in [held for arena in arenas if (held := find_ready(arena, step))]:
                try:
                    found.verify()
                except OvertakenError:
                    continue
                except DamagedError as error:
                    self.journal.event("snapshot", step=step, outcome="damaged", reason=str(error))
                else:
                    if found.unchanged():
                        found.arena.set_verified(found.index, found.header.sequence)
        for arena in arenas:
            arena.close()
        now = time.monotonic()
        self._next_verify = now + max(VERIFY_SECONDS, 20 * (now - begin))

    def _exchange_with_peers(self) -> None:
        """Other nodes connect here only where snapshots are copied to peers, and while a restore asks for it."""
        wanted = self.settings.get("mode") == "peer" or (self.run_memory.path / SERVE).exists()
        if not wanted or not self._partners.several:
            if self._peers is not None:
                self._peers.close()
                self._peers = None
            return
        if self._peers is None and time.monotonic() > self._next_listen:
            from holdfast.snapshot.keeper.replication import Replicator

            self._next_listen = time.monotonic() + LISTEN_SECONDS
            try:
                self._peers = Replicator(self.run_memory, self.journal)
            except (HoldfastError, OSError) as error:
                self._report_error(f"no connection to the other nodes: {error}; trying again")
        if self._peers is not None:
            self._peers.round(self.settings)

    def _over(self, pages: dict[int, RankStatus]) -> bool:
        """Ends when the run has: its memory is freed when all ranks left, or after a while when all are dead and saved, or when
        there is none: the trainer that wanted a keeper may have died before it claimed its status page."""
        if any(page.owner_alive() for page in (pages or self.run_memory.pages()).values()):
            self._dead_since = None
            return False
        statuses = {page["status"] for page in pages.values()}
        if statuses == {FINISHED} and self._partners.several:
            self._drop_what_is_pointless()
        if self._jobs and not self._ending:
            return False
        if pages and statuses <= {FINISHED, STOPPED}:
            return self._persist_last() and self._free()
        self._dead_since = self._dead_since or time.monotonic()
        if self._ending:
            deadline = time.monotonic() + ENDING_SECONDS
            while not self._persist_last() and time.monotonic() < deadline:
                time.sleep(ROUND_SECONDS)
            return True
        if time.monotonic() - self._dead_since > self.settings.get("linger_seconds", LINGER_SECONDS):
            return self._persist_last() and self._free()
        return False

    def _drop_what_is_pointless(self) -> None:
        """The run came to its end. What could not be written of a crash before that may need nodes that have left already."""
        for job in list(self._jobs):
            if job.step is None and job.reason != LAST:
                self._finish(job, None, "the run has ended")

    def _persist_last(self) -> bool:
        """The newest common step is on disk, or there is none."""
        job = next((job for job in self._jobs if job.reason == LAST), None)
        if job is None:
            job = SaveRequest(LAST)
            self._jobs.append(job)
        self._work_on_jobs()
        return job not in self._jobs

    def _free(self) -> bool:
        """Removes the memory, unless a new start of the run has claimed it meanwhile."""
        with self.run_memory.locked():
            if any(page.owner_alive() for page in self.run_memory.pages().values()):
                return False
            if self._peers is not None:
                self._peers.close()
            self._partners.close()
            self.run_memory.free()
        return True


def main(path: str) -> None:
    try:
        opened = _open(Path(path))
    except (HoldfastError, OSError) as error:
        sys.exit(f"the keeper cannot start: {error}")
    if opened is None:
        return
    run_memory, status, _lock = opened
    print(f"keeper {os.getpid()} keeps {run_memory.name}", flush=True)
    try:
        Keeper(run_memory, status).run()
    except BaseException as error:
        status.set_error_text(f"{type(error).__name__}: {error}")
        raise


def _open(folder: Path) -> tuple[RunMemory, RankStatus, int] | None:
    """The run's memory, the keeper's status page, and the descriptor of its lock; None if the run has a keeper already."""
    record = read_json(folder / "run.json")
    if record is None:
        raise HoldfastError(f"{folder} is not the memory of a run")
    run_memory = RunMemory(folder, record["name"], Path(record["folder"]))
    lock = lock_keeper(run_memory)
    if lock is None:
        return None
    os.nice(5)
    status = claim_status(run_memory)
    write_json(folder / "keeper.json", {"process": os.getpid(), "since": time.time()})
    return run_memory, status, lock


if __name__ == "__main__":
    main(sys.argv[1])
