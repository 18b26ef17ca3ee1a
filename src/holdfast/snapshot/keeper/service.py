"""The keeper: one small process per node and run, outside the trainers' session. It watches, verifies, writes to disk and frees.

    python -m holdfast.snapshot.keeper.service /dev/shm/holdfast-0/RUN-KEY

The invariants: all it knows is in the run's memory folder, so a new keeper continues the work of a killed one (it releases the
killed one's pins and reads the requests again); it removes only that folder, and only when no rank is alive and the newest whole
step in it is on disk. A round that fails is reported and tried again: no error of disk, memory or network ends the keeper. No
torch is imported.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.folder import remove_dead_temporaries as remove_unfinished_checkpoints
from holdfast.snapshot.keeper.failed_saves import clear_failed_save
from holdfast.snapshot.keeper.rank_watch import RankWatch
from holdfast.snapshot.keeper.save_queue import SaveQueue, node_arenas
from holdfast.snapshot.keeper.status import claim_status
from holdfast.snapshot.memory.ready_slot import OvertakenError, common_steps, find_ready
from holdfast.snapshot.memory.run_memory import (
    SERVE,
    RunMemory,
    lock_keeper,
    read_json,
    remove_dead_temporaries,
    write_json,
)
from holdfast.snapshot.memory.slot import DamagedError
from holdfast.snapshot.memory.slot_pins import release_killed_keepers
from holdfast.snapshot.ranks.status_page import FINISHED, STOPPED, RankStatus
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import BufferedJournal

if TYPE_CHECKING:
    from holdfast.snapshot.keeper.replication import Replicator

ROUND_SECONDS = 0.05
FAILED_ROUND_SECONDS = 1.0
LINGER_SECONDS = 600.0
VERIFY_SECONDS = 5.0
LISTEN_SECONDS = 10.0
ENDING_SECONDS = 20.0
ANSWER_SECONDS = 5.0


class Keeper:
    def __init__(self, run_memory: RunMemory, status: RankStatus) -> None:
        self._run_memory, self._status = run_memory, status
        self._journal = BufferedJournal(run_memory.folder / "events.jsonl")
        self._settings: dict[str, Any] = {}
        self._ranks = RankWatch(run_memory, self._journal)
        self._saves = SaveQueue(run_memory, self._journal, self._report_error)
        self._replicator: Replicator | None = None
        self._next_verify = self._next_listen = 0.0
        self._dead_since: float | None = None
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: Any) -> None:
        self._saves.ending = True

    def run(self, lock: int) -> None:
        """Until the run has ended, or something removed its memory, which the ranks then make again, with a keeper of its own."""
        recovered = False
        while os.fstat(lock).st_nlink:
            try:
                if not recovered:
                    self._recover()
                    recovered = True
                if self._round():
                    return
            except (HoldfastError, OSError) as error:
                self._report_error(f"{type(error).__name__}: {error}; trying again")
                time.sleep(FAILED_ROUND_SECONDS)
            time.sleep(ROUND_SECONDS)

    def _recover(self) -> None:
        """Removes what a killed keeper left: pins, its record of a failed save, a checkpoint that it was writing or removing."""
        release_killed_keepers(self._run_memory)
        clear_failed_save(self._run_memory)
        remove_unfinished_checkpoints(self._run_memory.folder / "checkpoints")

    def _round(self) -> bool:
        """Checks everything once; True when the run has ended and its memory is freed."""
        self._settings = read_json(self._run_memory.path / "settings.json") or self._settings
        self._saves.agreement.nodes = list(dict.fromkeys(self._settings.get("nodes", [])))
        self._replicate()
        here = self._settings.get("here", [])
        pages = {rank: page for rank, page in self._run_memory.pages().items() if rank in here}
        self._saves.pages = pages
        for failure in self._ranks.check(pages, self._settings):
            self._saves.add(failure)
        self._saves.read()
        self._saves.work()
        self._verify()
        return self._has_ended(pages)

    def _report_error(self, message: str) -> None:
        """Prints to the log, and stores on the status page for the trainer; the same message only once."""
        if message != self._status.error_text:
            self._status.set_error_text(message)
            print(message, flush=True)

    def _verify(self) -> None:
        """Compares the newest common step with its row sums, in at most a twentieth of the time."""
        if time.monotonic() < self._next_verify:
            return
        begin = time.monotonic()
        remove_dead_temporaries(self._run_memory)
        with node_arenas(self._run_memory) as arenas:
            for step in common_steps(arenas)[:1]:
                for found in [ready for arena in arenas if (ready := find_ready(arena, step))]:
                    try:
                        found.verify()
                    except OvertakenError:
                        continue
                    except DamagedError as error:
                        self._journal.event("snapshot", step=step, outcome="damaged", reason=str(error))
                    else:
                        if found.unchanged():
                            found.arena.set_verified(found.index, found.header.sequence)
        now = time.monotonic()
        self._next_verify = now + max(VERIFY_SECONDS, 20 * (now - begin))

    def _replicate(self) -> None:
        """Other nodes connect here only where snapshots are copied to peers, and while a restore needs it."""
        wanted = self._settings.get("mode") == "peer" or (self._run_memory.path / SERVE).exists()
        if not wanted or not self._saves.agreement.multi_node:
            self._close_replicator()
            return
        if self._replicator is None and time.monotonic() > self._next_listen:
            from holdfast.snapshot.keeper.replication import Replicator

            self._next_listen = time.monotonic() + LISTEN_SECONDS
            try:
                self._replicator = Replicator(self._run_memory, self._journal)
            except (HoldfastError, OSError) as error:
                self._report_error(f"no connection to the other nodes: {error}; trying again")
        if self._replicator is not None:
            self._replicator.round(self._settings)

    def _close_replicator(self) -> None:
        if self._replicator is not None:
            self._replicator.close()
            self._replicator = None

    def _has_ended(self, pages: dict[int, RankStatus]) -> bool:
        """The memory is freed when all ranks have ended, or a while after all died and were saved, or when the run has no rank:
        the trainer that started this keeper may have died before it claimed its status page."""
        claims = self._claims()
        if any(page.owner_alive() for page in (pages or self._run_memory.pages()).values()):
            self._dead_since = None
            return False
        statuses = {page["status"] for page in pages.values()}
        ending = self._saves.ending
        self._saves.read()  # what the ranks requested right before they ended
        if statuses == {FINISHED} and self._saves.agreement.multi_node:
            self._saves.drop_after_end()
        if self._saves and not ending:
            return False
        if pages and statuses <= {FINISHED, STOPPED}:
            return self._saves.write_last() and self._free(claims)
        self._dead_since = self._dead_since or time.monotonic()
        if ending:
            deadline = time.monotonic() + ENDING_SECONDS
            while not self._saves.write_last() and time.monotonic() < deadline:
                time.sleep(ROUND_SECONDS)
            return True
        if time.monotonic() - self._dead_since > self._settings.get("linger_seconds", LINGER_SECONDS):
            return self._saves.write_last() and self._free(claims)
        return False

    def _claims(self) -> dict[int, int]:
        return {rank: page["claims"] for rank, page in self._run_memory.pages().items()}

    def _free(self, claims: dict[int, int]) -> bool:
        """Removes the memory once the answers to `persist` are read. Does not where ranks have claimed it since `claims`, even
        if they are dead again: their newest step may not be on disk."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while any(self._run_memory.requests.glob("*.answer.json")) and time.monotonic() < deadline:
            time.sleep(ROUND_SECONDS)
        with self._run_memory.locked():
            if self._claims() != claims:
                return False
            self._close_replicator()
            self._saves.agreement.close()
            self._run_memory.free()
        return True


def main(path: str) -> None:
    try:
        opened = _open(Path(path))
    except (HoldfastError, OSError) as error:
        sys.exit(f"the keeper cannot start: {error}")
    if opened is None:
        return
    run_memory, status, lock = opened
    print(f"keeper {os.getpid()} keeps {run_memory.name}", flush=True)
    try:
        Keeper(run_memory, status).run(lock)
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
