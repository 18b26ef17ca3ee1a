"""After a stop: waits until the keeper has written the last step. A container or a job step ends with the supervisor, and its
keeper and memory with it."""

import time

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.memory.ready_slot import common_steps, newest_generation
from holdfast.snapshot.memory.run_memory import RunMemory, keeper_alive, opened_arenas, read_json
from holdfast.snapshot.ranks.status_page import FINISHED, STOPPED
from holdfast.system.progress import log

ANNOUNCE_SECONDS, FAILED_SECONDS, LONGEST_SECONDS = 3.0, 60.0, 600.0


def wait_for_last_save(run_memory: RunMemory) -> None:
    """Returns when the newest step of a stopped run is on disk, or cannot be written, which is logged. A signal ends the wait."""
    began, announced = time.monotonic(), False
    while (step := _unsaved_step(run_memory)) is not None:
        waited = time.monotonic() - began
        failed = read_json(run_memory.path / "failed_save.json")
        if waited > (FAILED_SECONDS if failed else LONGEST_SECONDS) or not keeper_alive(run_memory):
            reason = f": {failed['reason']}" if failed else ""
            log(f"warning: step {step} is not on disk{reason}. It is in memory, in {run_memory.path}")
            return
        if waited > ANNOUNCE_SECONDS and not announced:
            announced = True
            log(f"waiting up to {LONGEST_SECONDS:.0f} s until step {step} is on disk")
        time.sleep(0.05)


def _unsaved_step(run_memory: RunMemory) -> int | None:
    """The newest step in memory, if the ranks have ended as they should and no checkpoint is of that step."""
    if any(page["status"] not in (FINISHED, STOPPED) for page in run_memory.pages().values()):
        return None  # the keeper waits for the next start
    with opened_arenas(run_memory.arenas(), run_memory.key) as arenas:
        step = max(common_steps(newest_generation(arenas)), default=None)
    saved = max((saved for saved, _ in checkpoints_in(run_memory.folder)), default=-1)
    return None if step is None or step <= saved else step
