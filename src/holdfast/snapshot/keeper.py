"""The keeper: one small process per node and run, outside the trainers' session. It watches, verifies, writes to disk and frees.

    python -m holdfast.snapshot.keeper /dev/shm/holdfast-0/RUN-KEY

The invariants: all it knows is in the run's memory folder, so a keeper that is killed is replaced by one that goes on
from there; it removes only that folder, and only when all ranks have left it, or are dead and their state is on disk. No
torch is imported.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.errors import HoldfastError
from holdfast.journal import PatientJournal
from holdfast.snapshot.arena import Arena, DamagedError
from holdfast.snapshot.desk import FINISHED, RUNNING, STOPPED, Desk
from holdfast.snapshot.failed_saves import clear_failed_save, record_failed_save
from holdfast.snapshot.job import INVITED, Job
from holdfast.snapshot.partners import Partners
from holdfast.snapshot.persisting import (
    OvertakenError,
    common_steps,
    held_at,
    newest_generation,
    write_checkpoint,
)
from holdfast.snapshot.place import SERVE, Place, lock_keeper, open_arenas, read_json, write_json
from holdfast.snapshot.wishes import SAVE, STOP, TRIGGERS

ROUND_SECONDS = 0.05
LINGER_SECONDS = 600.0
VERIFY_SECONDS = 5.0
RETRY_SECONDS = 5.0
LISTEN_SECONDS = 10.0
STACKS_SECONDS = 0.3
SAVE_PATIENCE = 60.0
MEETING_PATIENCE, MEETING_PATIENCE_AT_THE_END = 15.0, 5.0
ENDING_SECONDS = 20.0


class Keeper:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.journal = PatientJournal(place.folder / "events.jsonl")
        self.settings: dict[str, Any] = {}
        self._jobs: list[Job] = []
        self._reported: set[tuple[int, int, str]] = set()
        self._next_verify = 0.0
        self._dead_since: float | None = None
        self._ending = False
        signal.signal(signal.SIGTERM, self._end)
        self._peers: Any = None
        self._next_listen = 0.0
        self._partners = Partners(place)

    def _end(self, *_: Any) -> None:
        self._ending = True

    def run(self) -> None:
        while self.place.path.exists():
            self.settings = read_json(self.place.path / "settings.json") or self.settings
            self._partners.nodes = list(dict.fromkeys(self.settings.get("nodes", [])))
            self._exchange_with_peers()
            desks = self._desks()
            self._watch(desks)
            self._take_triggers()
            self._take_requests()
            self._take_invitations()
            self._work_on_jobs()
            self._verify()
            if self._over(desks):
                return
            time.sleep(ROUND_SECONDS)

    @property
    def _checkpoints(self) -> Path:
        return self.place.folder / "checkpoints"

    def _desks(self) -> dict[int, Desk]:
        here = self.settings.get("here", [])
        return {rank: desk for rank, desk in self.place.desks().items() if rank in here}

    def arenas(self) -> list[Arena]:
        """The arenas of this node that count now; those of an older division go once the newer one holds a whole step."""
        opened = open_arenas(self.place.arenas(), self.place.key)
        chosen = newest_generation(opened)
        for arena in opened:
            if arena not in chosen:
                if chosen and arena.generation < chosen[0].generation and common_steps(chosen):
                    arena.path.unlink(missing_ok=True)
                arena.close()
        return chosen

    def _watch(self, desks: dict[int, Desk]) -> None:
        """Notices ranks that died without a word, and ranks that no longer give a sign of life."""
        patience = self.settings.get("hang_seconds", 600.0)
        for rank, desk in desks.items():
            mark = (rank, desk["started"], "death")
            if desk["status"] == RUNNING and not desk.occupied():
                if mark not in self._reported:
                    self._reported.add(mark)
                    self._failure("died", rank, desk, desks)
            elif desk.occupied() and desk.age > patience:
                mark = (rank, desk["started"], "hang")
                if mark not in self._reported:
                    self._reported.add(mark)
                    self._hang(rank, desk, desks)

    def _failure(self, kind: str, rank: int, desk: Desk, desks: dict[int, Desk]) -> None:
        stand = {str(r): f"step {d['step']}, {d.where}, {d.age:.1f} s ago" for r, d in desks.items()}
        self.journal.event(
            "failure",
            kind=kind,
            rank=rank,
            step=desk["step"],
            process=desk["process"],
            cause=desk.last_words,
            ranks=stand,
        )
        print(f"rank {rank} {kind} at step {desk['step']}: {desk.last_words or 'no last words'}; {stand}", flush=True)
        self._jobs.append(Job(kind))

    def _hang(self, rank: int, desk: Desk, desks: dict[int, Desk]) -> None:
        for other in desks.values():
            if other.occupied() and (self.place.path / f"{other.path.stem}.stacks").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other["process"], signal.SIGUSR2)
        self._failure("hung", rank, desk, desks)
        self._keep_stacks(desks)
        if self.settings.get("kill_hung"):
            for other in desks.values():
                if other.occupied():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other["process"], signal.SIGKILL)

    def _keep_stacks(self, desks: dict[int, Desk]) -> None:
        """Where every rank stood goes to the run folder; a rank that is stopped has nothing to say."""
        time.sleep(STACKS_SECONDS)
        for desk in desks.values():
            stacks = self.place.path / f"{desk.path.stem}.stacks"
            if stacks.exists() and stacks.stat().st_size:
                target = self.place.folder / "stacks" / f"{desk.path.stem}.txt"
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(stacks, target)

    def _take_triggers(self) -> None:
        """The files `persist` and `error.txt` in the run folder: persist what is held, and stop the run."""
        for name in TRIGGERS:
            trigger = self.place.folder / name
            if trigger.exists() and not any(job.trigger == trigger for job in self._jobs):
                (self.place.path / STOP).write_text(name)
                self._jobs.append(Job(name, trigger=trigger, stop=True))

    def _take_requests(self) -> None:
        known = {job.request for job in self._jobs}
        for path in sorted(self.place.requests.glob("*.json")):
            if path.name in known or path.name.endswith(".answer.json"):
                continue
            record = read_json(path)
            if record is None:
                continue
            job = Job.of_request(path.name, record)
            if job.stop:
                (self.place.path / STOP).write_text("persist --stop")
            self._jobs.append(job)
            if job.reason == "save":
                for other in self._jobs:
                    if other.wished:
                        other.save = other.save or job

    def _take_invitations(self) -> None:
        """Several nodes: the keeper of another one wants a step written."""
        with contextlib.suppress(OSError):  # the disk will be there again
            if self._partners.call(busy=any(job.stamp for job in self._jobs)):
                self._jobs.append(Job(INVITED))

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
                record_failed_save(self.place, job.step, str(error), retry_seconds)
                print(f"{job.reason}: {error}; memory is kept, trying again", flush=True)
                if job.answers:
                    self._finish(job, None, str(error))
            finally:
                for arena in arenas:
                    arena.close()

    def _do(self, job: Job, arenas: list[Arena]) -> None:
        """One attempt; a job that waits, or has to try an older step, is there again in the next round."""
        if self._trainers_see_to_it(job):
            return
        steps = [step for step in common_steps(arenas) if step not in job.damaged]
        on_disk = dict(checkpoints_in(self.place.folder))
        step = steps[0] if steps else None
        if job.step is not None:
            step = job.step if job.step in steps else None
            waited = time.monotonic() - job.since > SAVE_PATIENCE or _passed(arenas, job.step)
            if step is None and job.step not in job.damaged and not waited:
                return  # some rank is still copying
        elif step is None and self._may_still_come(job):
            return
        elif step is not None and step not in on_disk and self._partners.several:
            step = self._partners.agree(job, steps)
            if step is None:
                if not self._left_alone(job):
                    return
                step = steps[0] if job.reason != INVITED else None
        if step is None:
            self._finish(job, None, f"no step is held whole in memory (asked for: {job.step or 'the newest'})")
        elif step in on_disk and job.step is None:
            self._finish(job, on_disk[step], None)
        else:
            try:
                self._finish(job, self._write(job, arenas, step), None)
            except OvertakenError:
                job.ask_anew()  # there is a newer one
            except DamagedError as error:
                self.journal.event("snapshot", step=step, outcome="damaged", reason=str(error))
                job.damaged.append(step)
                job.ask_anew()

    def _trainers_see_to_it(self, job: Job) -> bool:
        """Several nodes that train: each keeper sees another step as the newest. So what is to be written is left to the ranks,
        who agree on a step: the last one where they are to stop, and a save where they go on."""
        if not self._partners.several:
            return False
        if job.stop:
            return self._may_still_come(job)
        if job.save is not None:
            if job.save in self._jobs and not job.save.tries:
                return True
            path = dict(checkpoints_in(self.place.folder)).get(job.save.step or 0)
            self._finish(job, path, None if path else job.save.trouble or f"step {job.save.step} was not saved")
            return True
        train = all(desk.occupied() for desk in self._desks().values())
        if job.reason in ("persist", "died") and train and self._may_still_come(job):
            if not job.wished:
                job.wished = True
                (self.place.path / SAVE).touch()
            return True
        return False

    def _left_alone(self, job: Job) -> bool:
        """Whether the other nodes were waited for long enough; from then on each goes its own way."""
        job.met = job.met or time.monotonic()
        patience = MEETING_PATIENCE if not self._ending else MEETING_PATIENCE_AT_THE_END
        if time.monotonic() - job.met > patience and not job.alone:
            self._partners.leave(job)
            job.alone = True
        return job.alone

    def _may_still_come(self, job: Job) -> bool:
        """Whether to look again for a step that all ranks hold: while they train, the first one may be on its way."""
        alive = any(desk.occupied() for desk in self._desks().values())
        return alive and time.monotonic() - job.since < SAVE_PATIENCE

    def _write(self, job: Job, arenas: list[Arena], step: int) -> Path:
        begin = time.perf_counter()
        slots = [found for arena in arenas if (found := held_at(arena, step))]
        for found in slots:
            found.arena.pin(found.index, True)
        keep = job.step is not None
        try:
            path = write_checkpoint(arenas, step, self._checkpoints, job.retention, alone=job.alone)
            keep = False
        finally:
            # what a trainer asked to save stays pinned until it is on disk
            if not keep:
                for found in slots:
                    found.arena.pin(found.index, False)
        clear_failed_save(self.place)
        if arenas[0].rank == 0:  # one word per checkpoint, however many nodes wrote it
            seconds = round(time.perf_counter() - begin, 4)
            size = sum(file.stat().st_size for file in path.iterdir())
            self.journal.event("persisted", step=step, path=str(path), reason=job.reason, bytes=size, seconds=seconds)
        return path

    def _finish(self, job: Job, path: Path | None, trouble: str | None) -> None:
        self._jobs.remove(job)
        if trouble:
            print(f"{job.reason}: {trouble}", flush=True)
        if job.reason == "save" and job.step is not None and path is None:
            for arena in open_arenas(self.place.arenas(), self.place.key):
                found = held_at(arena, job.step)
                if found:
                    arena.pin(found.index, False)
                arena.close()
        if job.request:
            (self.place.requests / job.request).unlink(missing_ok=True)
            if job.answers:
                answer = {"path": str(path) if path else None, "trouble": trouble}
                write_json(self.place.requests / job.request.replace(".json", ".answer.json"), answer)
        if job.trigger and path is not None:
            job.trigger.unlink(missing_ok=True)

    def _verify(self) -> None:
        """Now and then, at most a twentieth of the time: the newest common step is compared with its row sums."""
        if time.monotonic() < self._next_verify:
            return
        begin = time.monotonic()
        arenas = self.arenas()
        for step in common_steps(arenas)[:1]:
            for found in [held for arena in arenas if (held := held_at(arena, step))]:
                try:
                    found.verify()
                except OvertakenError:
                    continue
                except DamagedError as error:
                    self.journal.event("snapshot", step=step, outcome="damaged", reason=str(error))
                else:
                    if found.still_there():
                        found.arena.set_verified(found.index, found.header.sequence)
        for arena in arenas:
            arena.close()
        now = time.monotonic()
        self._next_verify = now + max(VERIFY_SECONDS, 20 * (now - begin))

    def _exchange_with_peers(self) -> None:
        """Other nodes connect here only where snapshots are copied to peers, and while a restore asks for it."""
        wanted = self.settings.get("mode") == "peer" or (self.place.path / SERVE).exists()
        if not wanted or not self._partners.several:
            if self._peers is not None:
                self._peers.close()
                self._peers = None
            return
        if self._peers is None and time.monotonic() > self._next_listen:
            from holdfast.snapshot.peers import Peers

            self._next_listen = time.monotonic() + LISTEN_SECONDS
            try:
                self._peers = Peers(self.place, self.journal)
            except (HoldfastError, OSError) as error:
                print(f"no connection to the other nodes: {error}; trying again", flush=True)
        if self._peers is not None:
            self._peers.round(self.settings)

    def _over(self, desks: dict[int, Desk]) -> bool:
        """Ends when the run has: its memory is freed when all ranks left, or after a while when all are dead and saved, or when
        there is none: the trainer that wanted a keeper may have died before it took its desk."""
        if any(desk.occupied() for desk in (desks or self.place.desks()).values()):
            self._dead_since = None
            return False
        statuses = {desk["status"] for desk in desks.values()}
        if statuses == {FINISHED} and self._partners.several:
            self._drop_what_is_pointless()
        if self._jobs and not self._ending:
            return False
        if desks and statuses <= {FINISHED, STOPPED}:
            if STOPPED in statuses and not self._persist_last():
                return False
            return self._free()
        self._dead_since = self._dead_since or time.monotonic()
        if self._ending:
            deadline = time.monotonic() + ENDING_SECONDS
            while not self._persist_last() and time.monotonic() < deadline:
                time.sleep(ROUND_SECONDS)
            return True
        if time.monotonic() - self._dead_since > self.settings.get("linger_seconds", LINGER_SECONDS):
            if not self._persist_last():
                return False
            return self._free()
        return False

    def _drop_what_is_pointless(self) -> None:
        """The run came to its end. What could not be written of a crash before that may need nodes that have left already."""
        for job in list(self._jobs):
            if job.step is None:
                self._finish(job, None, "the run has ended")

    def _persist_last(self) -> bool:
        """The newest common step is on disk, or there is none."""
        job = next((job for job in self._jobs if job.reason == "stopped"), None)
        if job is None:
            job = Job("stopped")
            self._jobs.append(job)
        self._work_on_jobs()
        return job not in self._jobs

    def _free(self) -> bool:
        """Removes the memory, unless a new start of the run has claimed it meanwhile."""
        with self.place.locked():
            if any(desk.occupied() for desk in self.place.desks().values()):
                return False
            if self._peers is not None:
                self._peers.close()
            self._partners.close()
            self.place.free()
        return True


def _passed(arenas: list[Arena], step: int) -> bool:
    """Whether every rank holds something newer: a step that is not there then does not come any more."""
    return bool(arenas) and all(max(arena.ready_steps(), default=-1) > step for arena in arenas)


def main(path: str) -> None:
    folder = Path(path)
    record = read_json(folder / "run.json")
    if record is None:
        sys.exit(f"{path} is not the memory of a run")
    place = Place(folder, record["name"], Path(record["folder"]))
    lock = lock_keeper(place)
    if lock is None:
        return
    os.nice(5)
    write_json(folder / "keeper.json", {"process": os.getpid(), "since": time.time()})
    print(f"keeper {os.getpid()} keeps {place.name}", flush=True)
    Keeper(place).run()


if __name__ == "__main__":
    main(sys.argv[1])
