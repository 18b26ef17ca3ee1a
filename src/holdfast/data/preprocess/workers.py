"""The worker pool of a run: the parent hands out units in order and receives results as they are ready.

Each worker is a fresh interpreter in a session of its own, connected by a socket pair. It starts from nothing, so the caller may
have any number of threads, and a script without an `if __name__ == "__main__"` guard works. Ctrl-C reaches the parent alone.
The invariant: no worker outlives its pool. `close` kills those that run; a worker whose parent is gone reads the end of its
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
EXIT_SECONDS = 60.0


class WorkerProcess:
    """One worker: the process and the parent's end of its connection."""

    def __init__(self) -> None:
        package = str(Path(holdfast.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                START,
                stdin=theirs.fileno(),
                env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.memory = 0
        """Peak memory in bytes, as of the last result."""

    def send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # `receive` reports a worker that is gone
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:  # OSError: it was killed in the middle of a message
            raise HoldfastError(f"{self._cause()}; finished work is kept; run the command again to continue") from error

    def _cause(self) -> str:
        try:
            status = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"a worker (process {self.process.pid}) closed its connection"
        if status >= 0:
            return f"a worker ended with exit status {status} before its work was done"
        hint = "; most likely memory ran out: use fewer --workers" if status == -signal.SIGKILL else ""
        return f"a worker was killed by signal {-status}{hint}"


class WorkerPool:
    """Worker processes. They load their modules while the caller loads its own; `set_up` then sends them the tokenizer."""

    def __init__(self, workers: int) -> None:
        self._workers = [WorkerProcess() for _ in range(workers)]
        self._starting = {worker.connection: worker for worker in self._workers}
        self.engine = ""
        """Name of the engine that the workers use, once the first one is ready."""

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        return [worker.process for worker in self._workers]

    @property
    def memory(self) -> int:
        """Peak memory of all workers in bytes."""
        return sum(worker.memory for worker in self._workers)

    def set_up(self, setup: "WorkerSetup") -> None:
        """Sends every worker what it needs to know once; to be called once."""
        message = pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)
        for worker in self._workers:
            worker.send(message)

    def results(self, units: "Iterator[tuple[int, Unit]]", folder: Path) -> "Iterator[tuple[Unit, UnitResult]]":
        """Hands out numbered units, whose parts go to `folder`, and yields each with its result, in the order of completion."""
        busy: dict[Connection, tuple[WorkerProcess, Unit]] = {}

        def hand_out(worker: WorkerProcess) -> None:
            following = next(units, None)
            if following is not None:
                busy[worker.connection] = worker, following[1]
                worker.send(pickle.dumps((*following, folder), pickle.HIGHEST_PROTOCOL))

        for worker in self._workers:
            if worker.connection not in self._starting:
                hand_out(worker)
        while self._starting or busy:
            for connection in wait([*self._starting, *busy]):
                assert isinstance(connection, Connection)
                if connection in self._starting:
                    worker = self._starting[connection]
                    self._set_engine(worker.receive())
                    del self._starting[connection]
                    hand_out(worker)
                    continue
                worker, unit = busy.pop(connection)
                result = worker.receive()
                worker.memory = result.memory
                # The worker gets its next unit first, and computes while the caller handles the result.
                hand_out(worker)
                yield unit, result

    def _set_engine(self, message: str | HoldfastError) -> None:
        if isinstance(message, HoldfastError):
            raise message
        self.engine = message

    def close(self) -> None:
        """Ends all workers. An idle one loses nothing; a busy one leaves a part file that the journal does not name."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.wait()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
