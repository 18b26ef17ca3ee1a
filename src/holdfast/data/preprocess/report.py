"""The progress of a run of `preprocess`, for people: a bar, or Megatron's lines with --log-interval."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast.data.preprocess.worker import EncodedPart
from holdfast.data.preprocess.workspace import Workspace
from holdfast.data.sources import Unit
from holdfast.system.progress import count_of, log, progress

if TYPE_CHECKING:
    from holdfast.data.preprocess.build import DatasetBuild


class ProgressReport:
    def __init__(self, task: "DatasetBuild", workspace: Workspace) -> None:
        self._task, self._workspace = task, workspace
        self._engine = ""
        self._documents = self._size = 0
        self._start = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> "ProgressReport":
        task, state = self._task, self._workspace.state
        total = sum(file.size for file in task.files) // (task.partition.count if task.partition else 1)
        self._bar = self._stack.enter_context(progress("preprocess", total or None))
        if state.next_unit or self._workspace.waiting:
            log(f"continuing after {count_of(state.documents, 'document')} ({self._workspace.folder})")
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def engine(self, name: str, workers: int) -> None:
        if name != self._engine:
            self._engine = name
            log(f"{self._task.recipe.tokenizer_type} by {name}, {count_of(workers, 'worker')}")

    def skipped(self, unit: Unit) -> None:
        """A unit that an earlier call finished."""
        self._bar.skip(unit.weight)

    def finished(self, unit: Unit) -> None:
        self._bar.advance(unit.weight)

    def appended(self, parts: Sequence[EncodedPart]) -> None:
        for part in parts:
            before = self._documents
            self._documents += part.documents
            self._size += part.size
            seconds = max(time.monotonic() - self._start, 1e-9)
            interval = self._task.options.log_interval
            if interval and self._documents // interval > before // interval:
                count = self._documents // interval * interval
                megabytes = self._size / seconds / 1024 / 1024
                log(f"Processed {count} documents ({self._documents / seconds:.2f} docs/s, {megabytes:.2f} MB/s).")
            self._bar.note(f"{self._documents / seconds:,.0f} docs/s")
