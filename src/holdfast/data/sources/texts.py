"""The texts of an input, read one after the other in this process, to train a tokenizer on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from holdfast.data.preprocess.units import plan
from holdfast.data.sources import bad_line_error, read_unit
from holdfast.data.sources.inputs import find_inputs
from holdfast.system.progress import Bar


class Texts:
    """Iterates in the order of the input, any number of times; standard input can be read only once."""

    def __init__(
        self,
        names: Sequence[str | Path],
        keys: Sequence[str] = ("text",),
        on_bad_line: Literal["fail", "skip"] = "fail",
        bar: Bar | None = None,
    ) -> None:
        self._files, self._keys = find_inputs(names), keys
        self._skip, self._bar = on_bad_line == "skip", bar
        self._size, self._readings = sum(file.size for file in self._files), 0
        self.bad_lines = 0
        """Lines that the latest reading left out."""

    def __iter__(self) -> Iterator[str]:
        self._readings, self.bad_lines = self._readings + 1, 0
        if self._bar and self._size:
            self._bar.total(self._readings * self._size)
            self._bar.note("")
        yield from self._read()
        if self._bar:
            self._bar.note("learning")

    def _read(self) -> Iterator[str]:
        file = lines = size = 0
        for unit in plan(self._files):
            if unit.file != file:
                file, lines, size = unit.file, 0, 0
            for batch in read_unit(unit, self._keys):
                if batch.bad and not self._skip:
                    bad = batch.bad[0]
                    raise bad_line_error(unit.source, unit.path, lines + bad.line + 1, size + bad.offset, bad.reason)
                self.bad_lines += len(batch.bad)
                lines, size = lines + batch.lines, size + batch.size
                for column in batch.values:
                    for value in column:
                        yield from [value] if isinstance(value, str) else value
            if self._bar:
                self._bar.advance(unit.weight)
