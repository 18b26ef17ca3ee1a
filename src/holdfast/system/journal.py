"""JSON-lines files that processes append to while others read them: `events.jsonl`, `metrics.jsonl`.

The invariant: one record is one write(2) of one line on a descriptor opened with O_APPEND, so a kill -9 can cost at most the
last line, several processes may append, and a reader sees whole lines only.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from holdfast.system.progress import log

RECORDS_KEPT = 10_000


class Journal:
    """Appends records to a JSON-lines file. Ends a torn last line of a killed writer before it appends."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._descriptor = self._open()

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, record: Mapping[str, Any]) -> None:
        os.write(self._descriptor, _line(record))

    def event(self, name: str, **details: Any) -> None:
        """One line of `events.jsonl`: what happened, when (seconds since the epoch), and its details."""
        self.write({"time": time.time(), "event": name, **details})

    def close(self) -> None:
        os.close(self._descriptor)


class BufferedJournal(Journal):
    """A journal that buffers: while its file cannot be written, the newest records stay in memory.

    For processes that a full or read-only disk must not end: trainers and keepers. Several threads may write.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._buffer: deque[bytes] = deque(maxlen=RECORDS_KEPT)
        self._torn = False
        self._lock = threading.Lock()  # over the buffer and its file
        self._descriptor = -1
        with contextlib.suppress(OSError):  # `_write_buffer` tries again
            self._descriptor = self._open()

    def write(self, record: Mapping[str, Any]) -> None:
        line = _line(record)
        with self._lock:
            reported = bool(self._buffer)
            self._buffer.append(line)
            error = self._write_buffer()
        if error is not None and not reported:
            log(f"warning: cannot write {self.path}: {error}; records are kept in memory until it can be written")

    def close(self) -> None:
        with self._lock:
            self._write_buffer()
            if self._descriptor >= 0:
                super().close()

    def _write_buffer(self) -> str | None:
        """Writes the buffered records; returns the reason if some are left. The caller holds the lock."""
        while self._buffer:
            line = b"\n" * self._torn + self._buffer[0]
            try:
                if self._descriptor < 0:
                    self._descriptor = self._open()
                written = os.write(self._descriptor, line)
            except OSError as error:
                return error.strerror or str(error)
            if written < len(line):
                # The disk became full in the middle: the next try writes the record again, on a new line.
                self._torn = self._torn or written > 0
                return os.strerror(errno.ENOSPC)
            self._torn = False
            self._buffer.popleft()
        return None


def _line(record: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def numbers_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record, without other values: a file that people can edit may hold anything."""
    return {
        key: value for key, value in record.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def tail_lines(path: Path | str, size: int) -> list[bytes]:
    """The whole lines in the last `size` bytes of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            skipped = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(skipped)
            return file.read().splitlines()[skipped > 0 :]
    except OSError:
        return []


def read_journal(path: Path | str) -> Iterator[dict[str, Any]]:
    """The whole records of a journal; a missing file has none, a torn line is skipped."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return
    for line in content.splitlines():
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record
