"""Starting the keeper: a process of its own session, which a signal to the trainers' process group does not reach."""

import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.snapshot.keeper.status import keeper_hung, keeper_status, kill_keeper
from holdfast.snapshot.memory.run_memory import RunMemory, keeper_alive
from holdfast.system.descriptors import open_private
from holdfast.system.errors import HoldfastError
from holdfast.system.processes import start_time
from holdfast.system.progress import log

START_SECONDS = 60.0
STARTS = 3
LOG_LINES = 6


def start_keeper(run_memory: RunMemory) -> None:
    """Makes sure that the run has a live keeper on this node; raises with the end of its log if none stays."""
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
        time.sleep(0.1)  # its predecessor may still have held the lock
    raise HoldfastError(f"the keeper of {run_memory.name} does not start: {log_end(run_memory)}")


def spawn_keeper(run_memory: RunMemory) -> int | None:
    """Starts a keeper unless there is one, and does not wait for it; its process number. A hung one is killed first."""
    if keeper_alive(run_memory):
        if not keeper_hung(run_memory):
            return None
        status = keeper_status(run_memory)
        log(
            f"warning: the keeper (process {status['process']}) gave no sign of life for {status.age:.0f} s; it is killed and "
            "replaced"
        )
        kill_keeper(run_memory)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    # No relative entry, and -P: a folder that the keeper happens to work in must not provide modules.
    given = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), *given])
    environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MALLOC_ARENA_MAX="2")
    command = [sys.executable, "-P", "-m", "holdfast.snapshot.keeper.service", str(run_memory.path)]
    with open(run_memory.path / "keeper.log", "ab", opener=open_private) as log_file:
        # A parent that ends at once leaves the keeper to init: the trainer never has a zombie child.
        started = subprocess.run(
            [sys.executable, "-SP", "-c", _FORK, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=environment,
            cwd="/",
            start_new_session=True,
            check=True,
        )
    return int(started.stdout)


def log_end(run_memory: RunMemory) -> str:
    """The last lines of the keeper's log, in one line."""
    path = run_memory.path / "keeper.log"
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} ends with: {' | '.join(line.strip() for line in lines[-LOG_LINES:]) or '(empty)'}"


_FORK = """import os, sys
process = os.fork()
if process:
    print(process)
else:
    os.dup2(2, 1)
    os.execv(sys.argv[1], sys.argv[1:])
"""
