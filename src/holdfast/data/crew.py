"""The workers of a run, seen from the process that leads them: units go out in order, answers come back as they are ready.

The invariant: when a Crew is closed, for whatever reason, none of its processes is left.
"""

import contextlib
import itertools
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
from holdfast.errors import HoldfastError

if TYPE_CHECKING:  # the caller wants its workers started before anything heavy is loaded
    from holdfast.data.sources import Unit
    from holdfast.data.worker import Answer, Job
    from holdfast.tokenizers.recipe import Recipe

# Not `-m`: what a worker pickles must come from a module of the same name as here.
START = "from holdfast.data.muster import main; main()"


class Crew:
    """Worker processes in a session of their own, so that Ctrl-C reaches this process alone, which then ends them.

    They start at once and get ready while the caller is still finding out what there is to do; `begin` tells them."""

    def __init__(self, workers: int) -> None:
        pairs = [socket.socketpair() for _ in range(workers)]
        theirs = [pair[1].fileno() for pair in pairs]
        package = str(Path(holdfast.__file__).parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            # One worker is one thread: pools that size themselves by the machine would fight over it.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "1",
            "FASTOKENS_BPE_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, theirs)],
            stdin=subprocess.PIPE,
            pass_fds=theirs,
            env=environment,
            start_new_session=True,
        )
        self._connections = [Connection(pair[0].detach()) for pair in pairs]
        for pair in pairs:
            pair[1].close()
        self._units: Iterator[tuple[int, Unit]] = iter(())
        self._busy: dict[Connection, Unit] = {}
        self.engine = ""
        self.memory = [0] * workers

    def prepare(self, recipe: "Recipe", *, with_tables: bool) -> None:
        """Tells the workers which tokenizer it will be, and whether to build the fast engine's tables meanwhile."""
        self._tell((recipe, with_tables))

    def begin(self, job: "Job", units: "Iterator[tuple[int, Unit]]") -> None:
        """Tells the workers what the run is about. Each finds its first unit waiting when it is ready, unless the unit brings
        its content with it: nobody would read that until then."""
        self._tell(job)
        first = list(itertools.islice(units, 1))
        self._units = itertools.chain(first, units)
        if first and not first[0][1].data:
            for connection in self._connections:
                self._hand_out(connection)

    def _hand_out(self, connection: Connection) -> None:
        following = next(self._units, None)
        if following is not None:
            self._busy[connection] = following[1]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(following)

    def _tell(self, message: object) -> None:
        """A worker that is gone is noticed when it is asked."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()

    def answers(self) -> "Iterator[tuple[Unit, Answer]]":
        """Hands out the units and gives each back with its answer, in the order of completion."""
        loading = set(self._connections)
        while loading or self._busy:
            for ready in wait(loading | self._busy.keys()):
                assert isinstance(ready, Connection)
                message = self._receive(ready)
                if ready in loading:
                    loading.remove(ready)
                    self.engine = str(message)
                    if ready not in self._busy:
                        self._hand_out(ready)
                    continue
                unit = self._busy.pop(ready)
                self.memory[self._connections.index(ready)] = message.memory
                # Out goes the next unit first, so that the worker computes while its answer is dealt with.
                self._hand_out(ready)
                yield unit, message

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:  # OSError: it was killed in the middle of its answer
            # The first process of the crew learns how the others ended; it looks when its own connection is closed.
            for one in self._connections:
                one.close()
            try:
                status = self._process.wait(60)
            except subprocess.TimeoutExpired:
                status = 0
            killer = -status if status < 0 else status - 128
            reason = f"was killed by signal {killer}" if killer > 0 else "ended before its work was done"
            hint = "; most likely memory ran out: use fewer --workers" if killer == signal.SIGKILL else ""
            raise HoldfastError(f"a worker {reason}{hint}; what is done is kept, call again to go on") from error

    def close(self, *, kill: bool = True) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for connection in self._connections:
            connection.close()
        if not kill:
            # Workers that hear no more of their job, or whose connection is closed, go by themselves.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        # The group is there as long as its leader has not been waited for.
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)
