"""Where documents come from: a source cuts its files into units that workers read alone, and reads them.

A source is a module with two functions, named in SOURCES:

    units(file: InputFile, unit_bytes: int) -> Iterator[Unit]    the file's documents in order, cut into units
    read(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]     the documents of one unit, in another process

The invariant: the units of a file depend on the file alone, and each document of the file is read by exactly one of them. So a
run can be interrupted, continued and partitioned, and gives the same bytes.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.system.errors import HoldfastError

Value = str | list[str]

SOURCES = {
    "jsonl": "holdfast.data.sources.jsonl",
    "passages": "holdfast.data.sources.passages",
    "parquet": "holdfast.data.sources.parquet",
    "text": "holdfast.data.sources.text",
    "wikipedia": "holdfast.data.sources.wikipedia",
}


@dataclass(frozen=True)
class InputFile:
    """One input, in the order of the user; `-` is standard input."""

    number: int
    path: str
    source: str
    compression: str
    """gz, xz, zst, bz2, or nothing."""
    size: int
    shared_out: bool = False
    """Many files are compressed in one piece each: a worker reads a whole one, instead of one reader feeding all workers."""


@dataclass(frozen=True)
class Unit:
    """A stretch of one file. The source defines what `start` and `end` count; `position` and `weight` are bytes on disk."""

    file: int
    path: str
    source: str
    how: str
    start: int
    end: int
    position: int
    weight: int
    data: bytes = field(default=b"", repr=False)
    """The unit's content, where only a single reader can bring it (standard input, one compressed stream)."""


@dataclass(frozen=True)
class BadLine:
    """A line that is not a document: its number and byte offset in the batch (from 0), and what is wrong with it."""

    line: int
    offset: int
    reason: str


def bad_line_error(source: str, file: str, line: int, offset: int, reason: str) -> HoldfastError:
    """The error for a bad line, counted from 1, where such lines end the run."""
    from holdfast.data.sources.recognition import wrong_format

    # A file of another format fails at its first line.
    if source == "jsonl" and line == 1 and (explanation := wrong_format(file)):
        return HoldfastError(f"{file} is not JSON lines (line 1: {reason}); {explanation}")
    return HoldfastError(
        f"{file}:{line}: bad line at byte {offset}: {reason}; "
        "fix it, or pass --on-bad-line skip to leave such lines out"
    )


@dataclass
class DocumentBatch:
    """Consecutive documents: per key a list with a value for each document, and the lines and bytes they took."""

    values: list[list[Value]]
    lines: int
    size: int
    bad: list[BadLine] = field(default_factory=list)
    content: bytes = field(default=b"", repr=False)
    """The bytes that the batch was read from, for the digest of the input (where it came as bytes)."""

    @property
    def documents(self) -> int:
        return len(self.values[0])


class DocumentSource(Protocol):
    def units(self, file: InputFile, unit_bytes: int) -> Iterator[Unit]: ...

    def read(self, unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]: ...


def source_named(name: str) -> DocumentSource:
    # Modules that have the two functions are sources; importing late keeps pyarrow and its like out of every other run.
    module: DocumentSource = importlib.import_module(SOURCES[name])
    return module


def read_unit(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    return source_named(unit.source).read(unit, keys)
