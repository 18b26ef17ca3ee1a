"""The worker pool of a run: the parent hands out units in order and receives results as they are ready.

The pool starts one interpreter, which loads the tokenizer once and forks the workers, so that they share its tables; each
worker has its own socket to the parent. The interpreter starts from nothing: the caller may have any number of threads, and a
script without an `if __name__ == "__main__"` guard works. Its session is its own: Ctrl-C reaches the parent alone.
The invariant: no worker outlives its pool. `close` kills the process group; a worker whose parent is gone reads the end of its
socket and exits.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.system.errors import HoldfastError

if TYPE_CHECKING:  # the pool starts before the caller loads anything heavy
    from holdfast.data.preprocess.worker import UnitResult, WorkerSetup
    from holdfast.data.sources import Unit

# A worker is one thread: thread pools sized by the machine would compete for it.
SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "FASTOKENS_BPE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Not `-m`: a pickled class must have the same module name on both sides. `-P`: no module is imported from the working directory.
START = [sys.executable, "-P", "-c", "from holdfast.data.preprocess.worker import main; main()"]
EXIT_SECONDS, GRACE_SECONDS = 60.0, 5.0


class WorkerPool:
    """Worker processes. They load their modules while the caller loads its own; `set_up` then sends them the tokenizer."""

    def __init__(self, workers: int) -> None:
        package = str(Path(holdfast.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with contextlib.ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(workers)]
            theirs = [stack.enter_context(pair[1]).fileno() for pair in pairs]
            self.process = subprocess.Popen(
                [*START, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
                start_new_session=True,
            )
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        self._starting = set(self._connections)
        self._memory = dict.fromkeys(self._connections, 0)
        self.engine = ""
        """Name of the engine that the workers use, once the first one is ready."""

    @property
    def workers(self) -> int:
        return len(self._connections)

    @property
    def memory(self) -> int:
        """Peak memory of all workers in bytes, pages that they share counted for each."""
        return sum(self._memory.values())

    def set_up(self, setup: "WorkerSetup") -> None:
        """Sends what the workers need to know once; to be called once."""
        self._send(self._connections[0], setup)

    def results(self, units: "Iterator[tuple[int, Unit]]", folder: Path) -> "Iterator[tuple[Unit, UnitResult]]":
        """Hands out numbered units, whose parts go to `folder`, and yields each with its result, in the order of completion."""
        busy: dict[Connection, Unit] = {}

        def hand_out(connection: Connection) -> None:
            following = next(units, None)
            if following is not None:
                busy[connection] = following[1]
                self._send(connection, (*following, folder))

        for connection in self._connections:
            if connection not in self._starting:
                hand_out(connection)
        while self._starting or busy:
            for ready in wait(self._starting | busy.keys()):
                assert isinstance(ready, Connection)
                message = self._receive(ready)
                if ready in self._starting:
                    self._starting.remove(ready)
                    if isinstance(message, HoldfastError):
                        raise message
                    self.engine = message
                    hand_out(ready)
                    continue
                unit = busy.pop(ready)
                self._memory[ready] = message.memory
                # The worker gets its next unit first, and computes while the caller handles the result.
                hand_out(ready)
                yield unit, message

    def _send(self, connection: Connection, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # `_receive` reports a worker that is gone
            connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:  # OSError: it was killed in the middle of a message
            raise HoldfastError(f"{self._cause()}; finished work is kept; run the command again to continue") from error

    def _cause(self) -> str:
        """Why a worker is gone: the process that forked it exits with the worker's status."""
        try:
            status = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "a worker closed its connection"
        killer = -status if status < 0 else status - 128
        if killer <= 0:
            return f"a worker ended with exit status {status} before its work was done"
        hint = "; most likely memory ran out: use fewer --workers" if killer == signal.SIGKILL else ""
        return f"a worker was killed by signal {killer}{hint}"

    def close(self, grace_seconds: float = 0.0) -> None:
        """Ends all workers: idle ones by themselves within the grace period, all others by a signal.

        A worker that is killed leaves a part file that the journal does not name.
        """
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
        # The group exists as long as its leader has not been waited for.
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(GRACE_SECONDS if kind is None else 0.0)
