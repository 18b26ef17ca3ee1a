"""Which units a run processes: all of the input, or one of several partitions of it.

The invariant: the partitions of a plan, one after the other, are the units of the whole; so their datasets, merged, are its
dataset.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from holdfast.data.sources import InputFile, Unit, source_named
from holdfast.data.sources.lines import unit_lines

LARGEST_UNIT, SMALLEST_UNIT = 2 << 20, 256 << 10
EDGE_BYTES = 1 << 16
COMPRESSION = 3  # text is at least this many times as large as what it is compressed to


@dataclass(frozen=True)
class Partition:
    """Partition `index` of `count`, cut by position in the input."""

    index: int
    count: int

    def owns(self, position: int, total: int) -> bool:
        return position * self.count // max(total, 1) == self.index


def unit_bytes(files: Sequence[InputFile]) -> int:
    """Small enough that a handful of workers stays busy to the end, large enough that a unit costs nothing to hand out."""
    total = sum(file.size * (COMPRESSION if file.compression else 1) for file in files)
    return min(max(total // 64, SMALLEST_UNIT), LARGEST_UNIT)


def most_units(files: Sequence[InputFile]) -> int:
    """An upper bound of the number of units; only plain JSON lines give one before they are read."""
    if any(file.source != "jsonl" or file.compression or file.path == "-" for file in files):
        return sys.maxsize
    size = unit_bytes(files)
    return max(1, sum(-(-file.size // size) for file in files))


def plan(files: Sequence[InputFile], partition: Partition | None = None, size: int | None = None) -> Iterator[Unit]:
    """The units of the partition, in the order of the input; `size` is that of a run that began with other units."""
    size = size or unit_bytes(files)
    total = sum(file.size for file in files)
    before = 0
    for file in files:
        for unit in source_named(file.source).units(file, size):
            if partition is None or partition.owns(before + unit.position, total):
                yield unit
            elif unit.how == "fed":
                break  # such a file goes to one partition as a whole: no need to read on
        before += file.size


def lines_before(files: Sequence[InputFile], unit: Unit) -> tuple[int, int]:
    """Lines and bytes of the unit's file in front of what the unit owns; reads the file up to there."""
    lines = size = 0
    for earlier in source_named(unit.source).units(files[unit.file], unit_bytes(files)):
        if earlier.start >= unit.start:
            break
        if earlier.source == "jsonl":
            for block in unit_lines(earlier):
                lines, size = lines + block.count(b"\n"), size + len(block)
    return lines, size


def identity(file: InputFile) -> dict[str, Any]:
    """The identity of an input: name, size, modification time, and a digest of its first and last bytes."""
    if file.path == "-":
        return {"path": "-"}
    path = Path(file.path).resolve()
    status = path.stat()
    with path.open("rb") as content:
        edges = os.pread(content.fileno(), EDGE_BYTES, 0)
        edges += os.pread(content.fileno(), EDGE_BYTES, max(0, status.st_size - EDGE_BYTES))
    digest = xxhash.xxh3_128_hexdigest(edges)
    return {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "edges": digest}
