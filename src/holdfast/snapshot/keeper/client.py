"""What the first rank of a node does about its keeper: starts and replaces it, reports its failures, waits for a save.

The invariants: the keeper has a session of its own, which a signal to the trainers' process group does not reach; `KeeperClient`
never ends or stops the training; `wait_for_save` returns within its limits, and reads from the checkpoint itself whether the step
is on disk.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from shlex import quote

from holdfast.checkpoint.folder import step_folder_name
from holdfast.snapshot.keeper.checkpoint_writer import is_published
from holdfast.snapshot.keeper.failed_saves import FailedSaveReport
from holdfast.snapshot.keeper.status import keeper_hung, keeper_status, kill_keeper
from holdfast.snapshot.memory.run_memory import MEMORY, RunMemory, keeper_alive
from holdfast.system.descriptors import open_private
from holdfast.system.errors import HoldfastError
from holdfast.system.processes import start_time
from holdfast.system.progress import log

START_SECONDS = 60.0
STARTS = 3
LOG_LINES = 6
CHECK_SECONDS = 2.0
LONGEST_CHECK_SECONDS = 60.0
STABLE_SECONDS = 10.0
FAILED_STARTS = 4
FAILED_SAVE_SECONDS = 60.0
"""how long `close` waits for a save that fails again and again"""
FREE_SECONDS = 10.0
ANNOUNCE_SECONDS = 5.0

_FORK_SCRIPT = """import os, sys
process = os.fork()
if process:
    print(process)
else:
    os.dup2(2, 1)
    os.execv(sys.argv[1], sys.argv[1:])
"""


def start_keeper(run_memory: RunMemory) -> None:
    """Makes sure that the run has a live keeper on this node; raises with the end of its log if it does not start."""
    for _ in range(STARTS):
        process = spawn_keeper(run_memory)
        if process is None:
            return
        deadline = time.monotonic() + START_SECONDS
        while start_time(process) and time.monotonic() < deadline:
            if keeper_alive(run_memory):
                return
            time.sleep(0.02)
        if keeper_alive(run_memory):
            return
        time.sleep(0.1)  # the one before may still have held the lock
    raise HoldfastError(f"the keeper of {run_memory.name} does not start: {log_end(run_memory)}")


def spawn_keeper(run_memory: RunMemory) -> int | None:
    """Starts a keeper unless one is alive; its process id. Does not wait for it. A hung one is killed first."""
    if keeper_alive(run_memory):
        if not keeper_hung(run_memory):
            return None
        status = keeper_status(run_memory)
        log(
            f"warning: the keeper (process {status['process']}) stored no heartbeat for {status.age:.0f} s; it is killed and "
            "replaced"
        )
        kill_keeper(run_memory)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    # No relative entry, and -P: the working directory must not provide modules.
    absolute = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), *absolute])
    environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MALLOC_ARENA_MAX="2")
    command = [sys.executable, "-P", "-m", "holdfast.snapshot.keeper.service", str(run_memory.path)]
    with open(run_memory.path / "keeper.log", "ab", opener=open_private) as log_file:
        try:
            # A parent that ends at once leaves the keeper to init: the trainer never has a zombie child.
            started = subprocess.run(
                [sys.executable, "-SP", "-c", _FORK_SCRIPT, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=environment,
                cwd="/",
                start_new_session=True,
                timeout=START_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise HoldfastError(f"{sys.executable} did not start the keeper within {START_SECONDS:.0f} s") from None
    if not started.stdout:
        raise HoldfastError(f"{sys.executable} could not start the keeper: {log_end(run_memory)}")
    return int(started.stdout)


def log_end(run_memory: RunMemory) -> str:
    """The last lines of the keeper's log, joined to one line."""
    path = run_memory.path / "keeper.log"
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} ends with: {' | '.join(line.strip() for line in lines[-LOG_LINES:]) or '(empty)'}"


class KeeperClient:
    def __init__(self, run_memory: RunMemory) -> None:
        self._run_memory = run_memory
        self._failed_saves = FailedSaveReport(run_memory)
        self._next_check, self._starts, self._last_start = 0.0, 0, 0.0
        self._problem: str | None = None

    def check(self) -> None:
        """Reports failed saves and replaces a dead or hung keeper; at intervals, which grow while new keepers end soon."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            self._failed_saves.update()
            if spawn_keeper(self._run_memory) is None:
                if now - self._last_start > STABLE_SECONDS:
                    self._starts, self._problem = 0, None
                return
        except (OSError, HoldfastError) as error:
            if not self._run_memory.path.exists():
                return  # freed just now
            self._report(f"the keeper cannot be replaced: {error}")
        self._starts, self._last_start = self._starts + 1, now
        self._next_check = now + min(LONGEST_CHECK_SECONDS, CHECK_SECONDS * 2 ** max(0, self._starts - FAILED_STARTS))
        if self._starts >= FAILED_STARTS:
            self._report(f"the keeper ended {self._starts - 1} times soon after its start: {log_end(self._run_memory)}")

    def _report(self, problem: str) -> None:
        if self._problem is None:
            log(f"warning: {problem}. Nothing is saved to disk until it runs; training continues")
        self._problem = problem

    def expect_save(self) -> None:
        """The last save is requested now: failures of earlier ones do not count against it."""
        self._failed_saves.restart()

    def has_failed(self) -> bool:
        """Whether a save has failed for so long, or the keeper so often, that waiting makes no sense."""
        return self._starts >= FAILED_STARTS or self._failed_saves.seconds > FAILED_SAVE_SECONDS

    def wait_for_save(self, step: int, token: str, deadline: float) -> None:
        """Waits until the step is on disk and the memory is freed; raises if the step is not on disk by the deadline."""
        final = self._run_memory.folder / "checkpoints" / step_folder_name(step)
        began = time.monotonic()
        announced = False
        saved_at: float | None = None
        next_read = began
        while self._run_memory.path.exists():
            self.check()
            now = time.monotonic()
            if saved_at is None and now >= next_read:
                next_read = now + 0.5
                saved_at = now if is_published(final, token) else None
            if saved_at is not None and now - saved_at > FREE_SECONDS:
                break  # the keeper does the rest by itself
            if saved_at is None and (now > deadline or self.has_failed()):
                break
            if now - began > ANNOUNCE_SECONDS and not announced:
                announced = True
                log(f"waiting up to {deadline - now:.0f} s until step {step} is on disk")
            time.sleep(0.02)
        if not is_published(final, token):
            raise HoldfastError(self._not_saved(step, final))

    def _not_saved(self, step: int, final: Path) -> str:
        reason = self._failed_saves.reason or self._problem
        if not self._run_memory.path.exists():
            return f"step {step} was not written to {final}, and its memory is gone: {reason or 'the cause is unknown'}"
        reason = reason or keeper_status(self._run_memory).error_text or log_end(self._run_memory)
        memory = self._run_memory.path.parent.parent
        flag = "" if memory == Path(MEMORY) else f" --snapshot-dir {quote(str(memory))}"
        return (
            f"step {step} is not on disk: {reason}. The state is still in memory, in {self._run_memory.path}; to write it once "
            f"the cause is removed: holdfast persist {quote(str(self._run_memory.folder))}{flag}"
        )
