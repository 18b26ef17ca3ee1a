"""The fork server of a node, as the supervisor sees it: ranks that start without importing anything.

The supervisor gives the server (`fork_server.py`) one end of a socket per rank. The forked process becomes a child of the
supervisor, and runs as the rank once it gets its environment through that socket. The invariants: a forked process that gets no
environment ends, because its socket closes, so no rank runs twice; the server ends when the supervisor ends, because its own
socket closes; where the server is missing, slow or dead, ranks start as new processes.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.system.progress import log
from holdfast.train.fork_server import FORK, SERVER_LOG
from holdfast.train.rank_log import last_lines
from holdfast.train.standby import READY

READY_SECONDS = 120.0
ANNOUNCE_SECONDS = 10.0
FORK_SECONDS = 10.0
REPLACE_SECONDS = 60.0
"""Least time between two starts of the server."""
POLL_SECONDS = 0.01
PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A child of this process that another one forked; the part of subprocess.Popen that torchelastic uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            except ChildProcessError:  # another waitpid was faster: how it ended is unknown
                self.returncode = 1
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The server process. `command` runs it; `start_rank` forks a rank."""

    def __init__(self, command: Sequence[str], logs: Path) -> None:
        self._command, self._logs = command, logs
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready, self._started = False, 0.0

    def start(self) -> None:
        """Starts the server and does not wait for it. Does nothing where the kernel is not Linux."""
        if sys.platform != "linux":
            return
        self._started = time.monotonic()
        try:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), start_new_session=True)
        except OSError as error:  # no memory, too many processes or files
            self._drop(f"cannot be started: {error}")
            return
        self._control.settimeout(FORK_SECONDS)
        self._ready = False

    def keep(self) -> None:
        """Replaces a server that was ready and has ended since."""
        if self._process and self._process.poll() is not None:
            self._drop("ended")
        if not self._process and self._ready and time.monotonic() > self._started + REPLACE_SECONDS:
            self.start()

    def wait_until_ready(self) -> None:
        """Returns when ranks can be forked, or will not be."""
        announced = False
        while self._process and not self._ready:
            waited = time.monotonic() - self._started
            if waited > ANNOUNCE_SECONDS and not announced:
                announced = True
                log(f"waiting up to {READY_SECONDS:.0f} s until the fork server has imported what ranks need")
            if self._process.poll() is not None:
                self._drop("ended")
            elif waited > READY_SECONDS:
                self._drop(f"was not ready after {READY_SECONDS:.0f} s")
            else:
                self._read_ready(0.1)

    def start_rank(self, environment: dict[str, str]) -> ForkedProcess | None:
        """A process that runs as the rank with these variables; None if none could be forked."""
        if not self._process or not self._control or not (self._ready or self._read_ready(0)):
            return None
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs, _reparents_here():
                    socket.send_fds(self._control, [FORK], [theirs.fileno()])
                    process = ForkedProcess(self._read_process())
                with contextlib.suppress(OSError):  # if it has ended, the supervisor sees how
                    ours.sendall(json.dumps({**os.environ, **environment}).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._drop(f"did not fork a rank: {error or type(error).__name__}")
            return None
        return process

    def close(self) -> None:
        """Ends the server. Ranks that it forked go on."""
        if self._control:
            self._control.close()
        if self._process:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._control = None

    def _read_ready(self, seconds: float) -> bool:
        assert self._control is not None
        readable, _, _ = select.select([self._control], [], [], seconds)
        if readable:
            with contextlib.suppress(OSError):
                self._ready = self._control.recv(len(READY)) == READY
        return self._ready

    def _read_process(self) -> int:
        """The answer to FORK: the process, and an empty line once it is a child of this process."""
        assert self._control is not None
        answer = b""
        while not answer.endswith(b"\n\n"):
            received = self._control.recv(64)
            if not received:
                raise ConnectionError("it has ended")
            answer += received
        return int(answer)

    def _drop(self, what: str) -> None:
        log(f"the fork server {what}; ranks start as new processes")
        self.close()
        for line in last_lines(self._logs / SERVER_LOG):
            log(f"  | {line}")


@contextlib.contextmanager
def _reparents_here() -> Iterator[None]:
    """Processes whose parent ends meanwhile become children of this process, if it is an ancestor of them."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
