"""Ends every process that a test process started, even when the test process crashes.

    python leftovers.py PARENT MARK

runs beside a test process (pytest, an xdist worker, a pytest inside a test) until that process is gone, however it ended. Then it
kills what carries its mark: slurmctld, slurmd, munged, keepers, ranks, worker pools. The mark is an environment variable, which
every started program inherits, also a daemon that changes its parent and its session. The mark of an inner test process begins
with the mark of the outer one, so the end of the outer one ends both. This file imports only the standard library: the watcher
must start in milliseconds.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "HOLDFAST_TEST_SESSION"
ROUNDS = 20


def begin() -> str:
    """Marks this process's future children and starts the watcher; returns the mark."""
    inner = f"{os.getpid()}-{time.time_ns()}"
    mark = os.environ[NAME] = f"{os.environ[NAME]}/{inner}" if NAME in os.environ else inner
    subprocess.Popen(
        [sys.executable, "-S", __file__, str(os.getpid()), mark],
        env={},  # without the mark: the watcher must outlive what it kills
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return mark


def carrying(mark: str) -> Iterator[int]:
    """The processes that carry this mark or the mark of an inner test process, except this one."""
    variable = f"{NAME}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            if int(folder.name) != os.getpid() and any(one.startswith(variable) for one in environment):
                yield int(folder.name)


def kill_all(mark: str) -> list[str]:
    """Kills what carries the mark, again until none is left; returns the command lines."""
    killed = []
    for _ in range(ROUNDS):  # a process may start another one while this function reads /proc
        found = list(carrying(mark))
        for process in found:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                os.kill(process, signal.SIGKILL)
                killed.append(f"{process} {command[:150]}")
        if not found:
            break
        time.sleep(0.1)
    return killed


def watch(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    kill_all(mark)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
