"""Step times by rank: which rank computes longest while the others wait for it.

Reads the end of `rank_times.jsonl` only: at a thousand ranks a line has 10 kB.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.system.journal import tail_lines

TAIL_BYTES = 1 << 21
SHOWN_RANKS = 16


@dataclass(frozen=True)
class RankTime:
    """One rank over the records that were read."""

    rank: int
    median_ms: float
    newest_ms: float
    slowest: float
    """Share of the records in which this rank took longest."""


def read_rank_times(path: Path, tail_bytes: int = TAIL_BYTES) -> list[list[float]]:
    """The milliseconds of every rank, per logged iteration, in order: the newest lines with as many ranks as the last one."""
    found: dict[int, list[float]] = {}
    for line in tail_lines(path, tail_bytes):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        iteration, times = _times_of(record)
        if times:
            found[iteration] = times
    ordered = [found[iteration] for iteration in sorted(found)]
    return [times for times in ordered if len(times) == len(ordered[-1])]


def _times_of(record: Any) -> tuple[int, list[float]]:
    """The iteration and its times; no times if the record is damaged."""
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return 0, []
    times = record.get("compute_ms")
    if not isinstance(times, list) or not all(type(time) in (int, float) and time >= 0 for time in times):
        return 0, []
    return record["iteration"], times


def rank_times(records: Sequence[Sequence[float]]) -> list[RankTime]:
    """One entry per rank, the slowest first."""
    slowest = [max(range(len(times)), key=times.__getitem__) for times in records]
    found = [
        RankTime(rank, statistics.median(column), column[-1], slowest.count(rank) / len(records))
        for rank, column in enumerate(zip(*records, strict=True))
    ]
    return sorted(found, key=lambda entry: -entry.median_ms)


def rank_table(records: Sequence[Sequence[float]]) -> str:
    """The slowest ranks as a table with bars; nothing for a run of one rank."""
    if not records or len(records[-1]) < 2:
        return ""
    found = rank_times(records)
    middle, longest = statistics.median(entry.median_ms for entry in found), found[0].median_ms or 1.0
    rows = "".join(
        f'<tr><td class="number">{entry.rank}</td><td class="number">{entry.median_ms:,.1f}</td>'
        f'<td class="number">{entry.median_ms / (middle or 1.0):.2f} ×</td><td class="number">{entry.newest_ms:,.1f}</td>'
        f'<td class="number">{entry.slowest:.0%}</td><td class="ranks"><svg class="bar" viewBox="0 0 100 10" '
        f'preserveAspectRatio="none"><rect class="{"replay" if entry.median_ms > 1.1 * middle else "evaluation"}" '
        f'width="{100 * entry.median_ms / longest:.1f}" height="10"/></svg></td></tr>'
        for entry in found[:SHOWN_RANKS]
    )
    columns = ("rank", "median ms", "of the median rank", "newest ms", "slowest in")
    head = "".join(f'<th class="number">{name}</th>' for name in columns) + "<th></th>"
    shown = f"the {SHOWN_RANKS} slowest of {len(found):,} ranks" if len(found) > SHOWN_RANKS else "slowest first"
    title = (
        f"<h2>Step times by rank<small>{shown}; own work per step, without waiting for other ranks, over the last "
        f"{len(records):,} logged iterations</small></h2>"
    )
    return f'<section>{title}<div class="card"><div class="scroll"><table><tr>{head}</tr>{rows}</table></div></div></section>'
