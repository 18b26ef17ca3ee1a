"""What a run folder says about the run: its curves, its events, its checkpoints. Reads while the run goes on, changes nothing."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import LATEST, checkpoints_in
from holdfast.checkpoint.manifest import read_manifest
from holdfast.config import Config, read_config
from holdfast.errors import HoldfastError
from holdfast.journal import read_journal

Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Checkpoint:
    """One step folder. `trouble` says why it cannot be used."""

    step: int
    path: Path
    bytes: int
    world: int | None
    source: str
    latest: bool
    trouble: str | None


@dataclass(frozen=True)
class Run:
    """Everything the page shows."""

    path: Path
    config: Config | None
    metrics: list[dict[str, Any]]
    """One record per iteration, in order; where a step was computed again after a failure, the one that counted."""
    repeated: int
    """Logged iterations that were computed again."""
    events: list[dict[str, Any]]
    checkpoints: list[Checkpoint]

    def series(self, key: str, factor: float = 1.0) -> Series:
        """(iteration, value) wherever the value is there and finite (JSON has no other numbers)."""
        found = ((record["iteration"], record.get(key)) for record in self.metrics)
        return [(iteration, value * factor) for iteration, value in found if isinstance(value, int | float)]

    def median(self, key: str) -> float | None:
        """Over all but the first logged iteration, which starts kernels and compiles."""
        values = [value for _, value in self.series(key)]
        return statistics.median(values[1:] or values) if values else None

    def last(self, key: str) -> Any:
        return self.metrics[-1].get(key) if self.metrics else None

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    @property
    def incidents(self) -> int:
        """Failures as the run lived them: what several witnesses report before it goes on is one."""
        count, open_ = 0, False
        for event in self.events:
            if event["event"] == "failure":
                count, open_ = count + (not open_), True
            elif event["event"] in ("resumed", "started"):
                open_ = False
        return count

    @property
    def state(self) -> str:
        """How the run stands, from its last telling event."""
        for event in reversed(self.events):
            if event["event"] == "finished":
                return "stopped" if event.get("stopped") else "finished"
            if event["event"] == "failure":
                return "failed"
            if event["event"] in ("resumed", "started"):
                return "under way"
        return "unknown"


def read_run(path: Path | str) -> Run:
    """The run in a folder, finished or not."""
    folder = Path(path)
    if not folder.is_dir():
        raise HoldfastError(f"there is no run folder {folder}")
    if not any((folder / name).exists() for name in ("metrics.jsonl", "events.jsonl")):
        raise HoldfastError(f"{folder} is no run folder: it has neither metrics.jsonl nor events.jsonl")
    config = read_config(folder / "config.toml") if (folder / "config.toml").exists() else None
    metrics, repeated = _in_order(read_journal(folder / "metrics.jsonl"))
    events = [
        e for e in read_journal(folder / "events.jsonl") if "event" in e and isinstance(e.get("time"), int | float)
    ]
    events.sort(key=lambda event: float(event["time"]))
    return Run(folder, config, metrics, repeated, events, _checkpoints(folder))


def _in_order(records: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The last record of each iteration. A run that went back forgets what it had logged beyond that point."""
    kept: list[dict[str, Any]] = []
    repeated = 0
    for record in records:
        if not isinstance(record.get("iteration"), int):
            continue
        while kept and kept[-1]["iteration"] >= record["iteration"]:
            kept.pop()
            repeated += 1
        kept.append(record)
    return kept, repeated


def _checkpoints(folder: Path) -> list[Checkpoint]:
    latest = folder / "checkpoints" / LATEST
    newest = latest.read_text().strip() if latest.exists() else ""
    found = []
    for step, path in checkpoints_in(folder):
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        world, source, trouble = None, "", None
        try:
            manifest = read_manifest(path)
            world, source = manifest.world, manifest.source
        except (HoldfastError, OSError) as error:
            trouble = str(error)
        found.append(Checkpoint(step, path, size, world, source, path.name == Path(newest).name, trouble))
    return found


def thinned(series: Series, most: int = 600) -> Series:
    """At most `most` points: means of neighbours, so that a long run stays a light page."""
    if len(series) <= most:
        return series
    size = -(-len(series) // most)
    groups = (series[start : start + size] for start in range(0, len(series), size))
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def smoothed(series: Series, span: int) -> Series:
    """Exponential mean over about `span` points, without the bias of its start."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = []
    for x, y in series:
        total, weight = total * keep + y, weight * keep + 1
        found.append((x, total / weight))
    return found
