"""JSON-lines files that are appended to while others read them: `events.jsonl`, `metrics.jsonl`.

The invariant: one record is one write(2) of one line on a descriptor opened with O_APPEND, so a kill -9 can cost at most the
last line, several processes may append, and a reader sees whole lines only.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson


class Journal:
    """Appends records to a JSON-lines file. A torn last line of a killed writer is closed off, not glued to the next."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        os.write(self._descriptor, orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def event(self, name: str, **details: Any) -> None:
        """One line of `events.jsonl`: what happened, when (seconds since the epoch), and its details."""
        self.write({"time": time.time(), "event": name, **details})

    def close(self) -> None:
        os.close(self._descriptor)


def read_journal(path: Path | str) -> Iterator[dict[str, Any]]:
    """The whole records of a journal; a missing file has none, a torn line is passed over."""
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
