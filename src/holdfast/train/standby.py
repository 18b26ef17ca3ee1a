"""The spare processes of `--standby`, as the supervisor sees them: one per rank of this node, ready to become that rank.

A spare (`spare.py`) waits on a socket. The supervisor sends it the environment of its rank, and the spare runs as that rank from
then on: it is a child of the supervisor like every other rank. The invariants: a spare owns nothing of the run before that
(no status page, no claim, no place in a process group); every spare ends when the supervisor ends, because its socket closes;
a spare that ended, or is not ready yet, is not used, and the rank starts as a new process.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.system.progress import count_of, log
from holdfast.train.rank_log import last_lines

READY = b"ready"
REPLACE_SECONDS, LONGEST_REPLACE_SECONDS = 1.0, 60.0
"""Pause before a spare that ended is replaced; doubles each time until spares are ready again."""


def spare_log(folder: Path, local_rank: int | str) -> Path:
    return folder / f"spare-{local_rank}.log"


@dataclass(frozen=True)
class Spare:
    """A process that may become the rank."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket

    def is_ready(self) -> bool:
        try:
            return self.process.poll() is None and self.channel.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT) == READY
        except OSError:
            return False

    def become(self, environment: dict[str, str]) -> bool:
        """Hands the rank over; False if the process is not ready, or has ended."""
        if not self.is_ready():
            return False
        try:
            self.channel.recv(len(READY))  # a socket with unread bytes resets the connection when it is closed
            self.channel.sendall(json.dumps(environment).encode() + b"\n")
        except OSError:
            return False
        self.channel.close()
        return True

    def end(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Spares:
    """The spares of this node's ranks, by local rank. `command` runs a spare."""

    def __init__(self, command: Sequence[str], count: int, logs: Path) -> None:
        self._command, self._count, self._logs = command, count, logs
        self._spares: dict[int, Spare] = {}
        self._announced = False
        self._pause, self._next_start = REPLACE_SECONDS, 0.0

    def keep(self) -> None:
        """Starts the spares that are missing and replaces those that ended. Does not wait for them."""
        for local_rank, spare in list(self._spares.items()):
            if spare.process.poll() is not None:
                self._drop(local_rank, spare)
        if time.monotonic() < self._next_start:
            return
        for local_rank in range(self._count):
            if local_rank not in self._spares:
                try:
                    self._spares[local_rank] = self._start(local_rank)
                except OSError as error:  # no memory, too many processes or files: the ranks go on
                    self._wait_before_next(f"the spare of local rank {local_rank} cannot be started ({error})")
                    return
        if not self._announced and self.are_ready():
            self._announced, self._pause = True, REPLACE_SECONDS
            log(f"standby: {count_of(self._count, 'spare')} ready")

    def are_ready(self) -> bool:
        return len(self._spares) == self._count and all(spare.is_ready() for spare in self._spares.values())

    def processes(self) -> dict[int, int]:
        """Local rank → process."""
        return {local_rank: spare.process.pid for local_rank, spare in self._spares.items()}

    def take(self, local_rank: int, environment: dict[str, str]) -> "subprocess.Popen[bytes] | None":
        """The process that runs as this rank from now on; None if its spare cannot."""
        spare = self._spares.get(local_rank)
        if spare is None or not spare.become(environment):
            return None
        del self._spares[local_rank]
        self._announced = False
        return spare.process

    def close(self) -> None:
        for spare in self._spares.values():
            spare.end()
        self._spares = {}

    def _start(self, local_rank: int) -> Spare:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self._count)}
        with theirs:
            process = subprocess.Popen(self._command, stdin=theirs.fileno(), env=environment, start_new_session=True)
        return Spare(process, ours)

    def _drop(self, local_rank: int, spare: Spare) -> None:
        spare.end()
        del self._spares[local_rank]
        self._announced = False
        how = spare.process.returncode
        reason = f"killed by {signal.Signals(-how).name}" if how < 0 else f"exit code {how}"
        self._wait_before_next(f"the spare of local rank {local_rank} ended ({reason})")
        lines = last_lines(spare_log(self._logs, local_rank)) if how > 0 else []
        if lines:
            log("\n".join(f"  | {line}" for line in lines))

    def _wait_before_next(self, problem: str) -> None:
        log(f"standby: {problem}; starting another in {self._pause:.0f} s")
        self._next_start = time.monotonic() + self._pause
        self._pause = min(LONGEST_REPLACE_SECONDS, 2 * self._pause)
