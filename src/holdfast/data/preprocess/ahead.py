"""The process that will lead the workers of `preprocess`, forked by a program that has not yet read its command line.

It loads what workers need while its caller finds out what there is to do. Hence nothing is imported here that takes time.
"""

import os
import socket
import time

# One worker is one thread: pools that size themselves by the machine would fight over it.
ALONE = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "FASTOKENS_BPE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
STANDARD_INPUT = 0


class Forked:
    """A copy of this process; to be waited for as those of subprocess are."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.pid = os.fork()
        self._status: int | None = None
        if self.pid == 0:
            try:
                os.setsid()
                ours.close()  # only the caller's own end may keep it open
                os.dup2(theirs.fileno(), STANDARD_INPUT)
                theirs.close()
                from holdfast.data.preprocess.muster import main

                main()
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(1)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        began = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                import subprocess

                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.002)
        return status


waiting: list[tuple[Forked, socket.socket]] = []


def call_ahead() -> None:
    """Only for a program that does nothing else and has no threads yet. If there is nothing to do after all, the process goes
    with its caller, whose end of the socket is closed then."""
    os.environ.update(ALONE)
    ours, theirs = socket.socketpair()
    with theirs:
        waiting.append((Forked(ours, theirs), ours))
