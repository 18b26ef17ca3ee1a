"""The process that follows metrics.jsonl and sends each iteration to each tracker once.

    RUN/trackers/NAME.json     the tracker's id of the run, and the newest iteration that was sent

Iterations that a resumed run repeats are already sent, and are bit-identical: they are left out. A tracker that fails is
opened again after RETRY_SECONDS; metrics.jsonl keeps what it has not got. Standard input ends when rank 0 ends: the rest is
sent, with a limit of END_SECONDS, and the process ends.
"""

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import orjson

from holdfast.config import Config, read_config
from holdfast.system.atomic_files import publish_bytes, remove_temporaries
from holdfast.train.trackers.sinks import Record, Sink, sinks_of

POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0
END_SECONDS = 60
LOCK_SECONDS = 75.0
"""The follower of the previous start of rank 0 ends within END_SECONDS."""


class Follower:
    """Follows one file for one tracker."""

    def __init__(self, run: Path, config: Config, sink: Sink) -> None:
        self._run, self._config, self._sink = run, config, sink
        self._file = run / "metrics.jsonl"
        self._state = run / "trackers" / f"{sink.name}.json"
        self._open = False
        self._try_again = 0.0
        self._position = self._last = 0

    def follow(self) -> bool:
        """Sends what has been written since the last call; False if the tracker failed."""
        if time.monotonic() < self._try_again:
            return False
        try:
            if not self._open:
                self._open_sink()
            self._send_new()
        except Exception:  # whatever a tracker's library raises
            self._give_up("sending")
            return False
        return True

    def close(self) -> bool:
        self._try_again = 0.0
        if not self.follow():
            return False
        try:
            self._sink.close(self._last >= (self._config.train.train_iters or 0))
        except Exception:
            self._give_up("closing")
            return False
        self._save()
        return True

    def _open_sink(self) -> None:
        self._position = 0
        remove_temporaries(self._state)  # of a follower that was killed; the lock is held
        known = orjson.loads(self._state.read_bytes()) if self._state.exists() else {}
        self._id = self._sink.open(self._run, self._config, known.get("id"))
        self._last = max(known.get("iteration", 0), self._sink.last_iteration())
        self._open = True
        self._save()

    def _send_new(self) -> None:
        before = self._last
        for record in self._records():
            if record["iteration"] > self._last:
                self._sink.send(record)
                self._last = record["iteration"]
        if self._last != before and not self._sink.buffers:
            self._save()

    def _records(self) -> Iterator[Record]:
        """The whole records after the position; a torn line of a killed rank is left out."""
        if not self._file.exists():
            return
        with open(self._file, "rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                with contextlib.suppress(orjson.JSONDecodeError):
                    record = orjson.loads(line)
                    if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                        yield record

    def _save(self) -> None:
        publish_bytes(self._state, orjson.dumps({"id": self._id or None, "iteration": self._last}))

    def _give_up(self, action: str) -> None:
        print(f"{self._sink.name}: {action} failed; trying again in {RETRY_SECONDS:.0f} s", flush=True)
        traceback.print_exc()
        self._open, self._try_again = False, time.monotonic() + RETRY_SECONDS


def follow(run: Path) -> int:
    """Follows until standard input ends; 1 if a tracker did not get everything."""
    config = read_config(run / "config.toml")
    (run / "trackers").mkdir(exist_ok=True)
    with open(run / "trackers" / ".lock", "wb") as lock:
        if not _lock(lock.fileno()):
            print(f"another follower of {run} has not ended in {LOCK_SECONDS:.0f} s; this one ends", flush=True)
            return 1
        followers = [Follower(run, config, sink) for sink in sinks_of(config)]
        while not select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            for follower in followers:
                follower.follow()
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(END_SECONDS)
        closed = [follower.close() for follower in followers]
        return 0 if all(closed) else 1


def _lock(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.1)
    return False


def _end(number: int, frame: FrameType | None) -> None:
    print(f"a tracker has not ended in {END_SECONDS} s; the next start sends what is missing", flush=True)
    os._exit(1)


if __name__ == "__main__":
    os.nice(10)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # the end of rank 0 ends this process
    sys.exit(follow(Path(sys.argv[1])))
