"""The workers of a run, seen from the process that leads them: units go out in order, answers come back as they are ready.

The invariant: when a Crew is closed, for whatever reason, none of its processes is left.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import holdfast
from holdfast.data.preprocess import ahead
from holdfast.system.errors import HoldfastError

if TYPE_CHECKING:  # the caller wants its workers started before anything heavy is loaded
    from holdfast.data.preprocess.worker import Answer, Job
    from holdfast.data.sources import Unit
    from holdfast.tokenizers.recipe import Recipe

# Not `-m`: what a worker pickles must come from a module of the same name as here.
START = "from holdfast.data.preprocess.muster import main; main()"


class Leader:
    """The process that a crew is led by, in a session of its own: Ctrl-C reaches the caller alone, which then ends it."""

    def __init__(self) -> None:
        self.process, ours = ahead.waiting.pop() if ahead.waiting else started_anew()
        self._control = Connection(ours.detach())

    def tell(self, message: object) -> None:
        """One that is gone is noticed when its workers are asked."""
        with contextlib.suppress(ConnectionError):
            self._control.send(message)

    def connect(self) -> Connection:
        """A connection to a worker that it will have."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):
            send_handle(self._control, theirs.fileno(), self.process.pid)
        return Connection(ours.detach())

    def dismiss(self) -> None:
        """If it has no work yet, it will never have any; it goes by itself."""
        self._control.close()


def started_anew() -> tuple["Process", socket.socket]:
    """Knows nothing of its caller, which may have any number of threads and libraries that do not stand a fork."""
    package = str(Path(holdfast.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=theirs.fileno(),
            env={**os.environ, **ahead.ALONE, "PYTHONPATH": path},
            start_new_session=True,
        )
    return process, ours


class Process(Protocol):
    """What is asked of a Leader's process, however it began."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Crew:
    """Worker processes. They get ready while the caller is still finding out what there is to do; `begin` tells them."""

    def __init__(self, workers: int) -> None:
        self._leader = Leader()
        self._leader.tell(workers)
        self._connections = [self._leader.connect() for _ in range(workers)]
        self._units: Iterator[tuple[int, Unit]] = iter(())
        self._busy: dict[Connection, Unit] = {}
        self.engine = ""
        self.memory = [0] * workers

    def prepare(self, recipe: "Recipe", engine: str) -> None:
        """Tells the workers which tokenizer it will be: they build it before they know what else there is to do."""
        self._leader.tell((recipe, engine))

    def begin(self, job: "Job", units: "Iterator[tuple[int, Unit]]") -> None:
        """Tells the workers what the run is about. Each finds its first unit waiting when it is ready, unless the unit brings
        its content with it: nobody would read that until then."""
        self._leader.tell(job)
        first = list(itertools.islice(units, 1))
        self._units = itertools.chain(first, units)
        if first and not first[0][1].data:
            for connection in self._connections:
                self._hand_out(connection)

    def _hand_out(self, connection: Connection) -> None:
        following = next(self._units, None)
        if following is not None:
            self._busy[connection] = following[1]
            with contextlib.suppress(ConnectionError):  # noticed when its answer is waited for
                connection.send(following)

    def answers(self) -> "Iterator[tuple[Unit, Answer]]":
        """Hands out the units and gives each back with its answer, in the order of completion."""
        loading = set(self._connections)
        while loading or self._busy:
            for ready in wait(loading | self._busy.keys()):
                assert isinstance(ready, Connection)
                message = self._receive(ready)
                if ready in loading:
                    loading.remove(ready)
                    if isinstance(message, HoldfastError):
                        raise message
                    self.engine = str(message)
                    if ready not in self._busy:
                        self._hand_out(ready)
                    continue
                unit = self._busy.pop(ready)
                self.memory[self._connections.index(ready)] = message.memory
                # Out goes the next unit first, so that the worker computes while its answer is dealt with.
                self._hand_out(ready)
                yield unit, message
        # They go while the caller finishes its own work.
        self._dismiss()

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:  # OSError: it was killed in the middle of its answer
            # The first process of the crew learns how the others ended; it looks when its own connection is closed.
            for one in self._connections:
                one.close()
            try:
                status = self._leader.process.wait(60)
            except subprocess.TimeoutExpired:
                status = 0
            killer = -status if status < 0 else status - 128
            reason = f"was killed by signal {killer}" if killer > 0 else "ended before its work was done"
            hint = "; most likely memory ran out: use fewer --workers" if killer == signal.SIGKILL else ""
            raise HoldfastError(f"a worker {reason}{hint}; what is done is kept, call again to go on") from error

    def close(self, *, kill: bool = True) -> None:
        process = self._leader.process
        self._dismiss()
        if not kill:
            # Workers that hear no more of their job, or whose connection is closed, go by themselves.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        # The group is there as long as its leader has not been waited for.
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _dismiss(self) -> None:
        self._leader.dismiss()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)
