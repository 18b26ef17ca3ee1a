"""The keeper's status page in the run's memory: its process, its heartbeat, and its last error.

The invariant: a thread of the keeper stores a heartbeat every half second, however long the keeper waits for a disk. So a page
whose heartbeat does not change belongs to a process that is stopped or dead, not to a busy one.
"""

import os
import signal
import threading
import time

from holdfast.snapshot.memory.run_memory import RunMemory, keeper_alive
from holdfast.snapshot.ranks.status_page import RankStatus
from holdfast.system.errors import HoldfastError
from holdfast.system.processes import process_alive

BEAT_SECONDS = 0.5
HUNG_SECONDS = 30.0
RECHECK_SECONDS = 2.0
KILL_SECONDS = 10.0


def keeper_status(run_memory: RunMemory) -> RankStatus:
    return RankStatus(run_memory.path / "keeper.status")


def claim_status(run_memory: RunMemory) -> RankStatus:
    """Claims the page for this process, and stores heartbeats until it ends."""
    status = keeper_status(run_memory)
    status.claim()
    threading.Thread(target=_beat, args=(status,), name="heartbeat", daemon=True).start()
    return status


def _beat(status: RankStatus) -> None:
    while True:
        status.beat(2)
        time.sleep(BEAT_SECONDS)


def keeper_hung(run_memory: RunMemory) -> bool:
    """Whether a process holds the keeper's lock and has stored no heartbeat for a while, nor stores one while this waits."""
    status = keeper_status(run_memory)
    heartbeat = status["heartbeat"]
    if not heartbeat or status.age < HUNG_SECONDS or not process_alive(status["process"], status["started"]):
        return False
    # The whole machine may have been suspended, this process with it: the second check decides.
    deadline = time.monotonic() + RECHECK_SECONDS
    while time.monotonic() < deadline:
        if status["heartbeat"] != heartbeat:
            return False
        time.sleep(BEAT_SECONDS / 5)
    return keeper_alive(run_memory)


def discard(run_memory: RunMemory) -> None:
    """Kills the keeper of a run and frees its memory, saved or not."""
    if run_memory.path.exists():
        kill_keeper(run_memory)
        with run_memory.locked():
            run_memory.free()


def kill_keeper(run_memory: RunMemory) -> None:
    """Kills a hung keeper, and waits until its lock is free."""
    status = keeper_status(run_memory)
    process = status["process"]
    if process_alive(process, status["started"]):
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while keeper_alive(run_memory):
        if time.monotonic() > deadline:
            raise HoldfastError(
                f"the keeper (process {process}) does not end after SIGKILL: the disk of {run_memory.folder} may not respond"
            )
        time.sleep(0.02)
