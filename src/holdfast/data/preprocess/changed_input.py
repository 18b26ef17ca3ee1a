"""What stays valid of an unfinished run when the user has changed an input file, for example to fix a bad line in it.

A part of a unit of lines is a function of the unit's bytes, and the journal holds a digest of them. So the units of the changed
file are cut and read again, which is far cheaper than tokenizing them, and those with the same bytes are kept. The invariant:
what is kept is what a fresh run over the changed input would compute.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from holdfast.data.preprocess.history import History, chained
from holdfast.data.sources import InputFile, Unit, source_named
from holdfast.data.sources.lines import unit_lines
from holdfast.system.progress import Bar, count_of, log, progress

# Sources whose units hold the lines of `unit_lines`, and nothing else decides what becomes of them.
LINE_SOURCES = ("jsonl", "passages")


def cuts(files: Sequence[InputFile]) -> list[list[Any]]:
    """What decides, beside its bytes, how each file is cut into units."""
    return [[file.source, file.compression, file.shared_out] for file in files]


def same_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether both settings are about the same list of files, whatever is in them."""
    names = [[file["path"] for file in settings.get("inputs", [])] for settings in (before, now)]
    return names[0] == names[1]


def keep_unchanged(
    history: History, before: Mapping[str, Any], now: Mapping[str, Any], files: Sequence[InputFile], unit_size: int
) -> History:
    """The history as far as it is true of the input as it is now."""
    number = 0
    with progress("checking the changed input", sum(file.size for file in files[: history.last_file + 1])) as bar:
        for file in files[: history.last_file + 1]:
            place = file.number
            if before["cuts"][place] != now["cuts"][place]:
                return _cut(history, file, 0, set())
            if before["inputs"][place] == now["inputs"][place]:
                number += sum(1 for _ in source_named(file.source).units(file, unit_size))
                bar.advance(file.size)
                continue
            if file.source not in LINE_SOURCES:
                return _cut(history, file, 0, set())
            check = _Check(history, file, number)
            for unit in source_named(file.source).units(file, unit_size):
                check.add(unit, bar)
            if not check.is_whole():
                return _cut(history, file, check.kept, check.parts)
            number = check.number
    return history


class _Check:
    """Compares the units of one file with what the history says of them."""

    def __init__(self, history: History, file: InputFile, number: int) -> None:
        self._history, self._file = history, file.number
        self._states = {state.next_unit: state for state in history.states if state.file == file.number}
        self._digest = ""
        self.number, self.kept = number, 0
        """Number of the next unit, and of the first one that no verified state holds."""
        self.parts: set[int] = set()

    def add(self, unit: Unit, bar: Bar) -> None:
        content = xxhash.xxh3_128()
        for block in unit_lines(unit):
            content.update(block)
        self._digest = chained(self._digest, content.hexdigest())
        part = self._history.parts.get(self.number)
        if part is not None and part.file == self._file and part.digest == content.hexdigest():
            self.parts.add(self.number)
        self.number += 1
        state = self._states.get(self.number)
        if state is not None and state.digest == self._digest:
            self.kept = self.number
        bar.advance(unit.weight)

    def is_whole(self) -> bool:
        """Whether the file was appended to its end, and still is the same."""
        return self._history.digests.get(self._file) == self._digest


def _cut(history: History, file: InputFile, units: int, parts: set[int]) -> History:
    """The history without the units of `file` from number `units` on, but for some parts, and without later files."""
    kept = history.only(
        lambda state: state.file < file.number or (state.file == file.number and state.next_unit <= units),
        lambda part: part.file < file.number or part.unit in parts,
    )
    documents = kept.states[-1].documents if kept.states else 0
    log(f"{file.path} has changed since this run stopped; {count_of(documents, 'document')} before the change are kept")
    return kept
