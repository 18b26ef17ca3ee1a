"""What the panel shows, read from the files of the run: metrics.jsonl, events.jsonl and the ranks' status pages.

The panel reads only what the ranks write anyway, so it costs them nothing.
"""

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from holdfast.config import Config
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.system.journal import numbers_of
from holdfast.train.run_folder.events import as_int

HISTORY, EVENTS = 2000, 50
TAIL_BYTES = 1 << 20


class JournalTail:
    """The records that a journal gains, beginning with the last TAIL_BYTES that it has at the first call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None

    def new_records(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if self._offset is None:
                    self._offset = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            with suppress(orjson.JSONDecodeError):  # a torn line, or the first one, which the offset cuts
                record = orjson.loads(line)
                if isinstance(record, dict):
                    found.append(record)
        return found


class RunView:
    """The newest state of a run of which this node runs some ranks."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(str(config.train.save))
        self.iterations, self.samples = config.train.train_iters, config.train.train_samples
        self.ranks_started = config.parallel.nproc_per_node
        self._memory = RunMemory.of(self.folder.resolve().name, self.folder, config.snapshot.snapshot_dir)
        self._metrics = JournalTail(self.folder / "metrics.jsonl")
        self._events = JournalTail(self.folder / "events.jsonl")
        self.records: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.saved_step: int | None = None
        self.validation_loss: float | None = None
        self.started = time.time()
        self.ranks_alive, self.phases, self.restarts = 0, set[str](), 0
        self.snapshot_step, self._snapshot_since = -1, time.monotonic()

    def read(self) -> None:
        for record in map(numbers_of, self._metrics.new_records()):
            if not isinstance(record.get("iteration"), int) or record["iteration"] < 0:
                continue
            while self.records and self.records[-1]["iteration"] >= record["iteration"]:
                self.records.pop()  # a resume computes these steps again
            self.records.append(record)
            self.validation_loss = record.get("validation_loss", self.validation_loss)
        for event in self._events.new_records():
            if isinstance(event.get("event"), str) and isinstance(event.get("time"), float | int):
                self.events.append(event)
                if event["event"] == "persisted":
                    self.saved_step = as_int(event.get("step"))
        with suppress(OSError):  # the memory is freed while it is read
            self._read_status_pages()

    def _read_status_pages(self) -> None:
        pages = list(self._memory.pages().values())
        alive = [page for page in pages if page.owner_alive()]
        self.ranks_alive, self.phases = len(alive), {page.phase_name for page in alive}
        self.restarts = max((page["restarts"] for page in alive), default=self.restarts)
        newest = min((page["ready"] for page in pages), default=-1)
        if newest != self.snapshot_step:
            self.snapshot_step, self._snapshot_since = newest, time.monotonic()

    @property
    def snapshot_age(self) -> float:
        """Seconds since the newest snapshot of all ranks of this node became ready, as seen by this process."""
        return time.monotonic() - self._snapshot_since

    @property
    def last(self) -> dict[str, Any]:
        return self.records[-1] if self.records else {}

    @property
    def share(self) -> float:
        """The part of the training that is done, 0 to 1."""
        done, total = (
            (self.last.get("iteration"), self.iterations)
            if self.iterations
            else (self.last.get("consumed_samples"), self.samples)
        )
        return max(0.0, min(1.0, done / total)) if done and total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the records since this start; None before its second one."""
        recent = [record for record in self.records if record.get("time", 0) >= self.started]
        if len(recent) < 2 or not self.share:
            return None
        pace = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["iteration"] - recent[0]["iteration"])
        return float(pace * recent[-1]["iteration"] * (1 - self.share) / self.share)
