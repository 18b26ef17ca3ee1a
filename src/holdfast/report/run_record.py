"""Reads a run folder: metrics, events, checkpoints. The run may be running; nothing is changed.

The invariant: a damaged file of the folder is named in `problems`, and the rest is read; only regular files are opened.
"""

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.checkpoint.folder import LATEST
from holdfast.config import Config, read_config
from holdfast.report.rank_times import read_rank_times
from holdfast.snapshot.report import disk_facts, is_run_folder, run_folders_in
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import numbers_of, read_journal
from holdfast.system.progress import count_of

Series = list[tuple[float, float]]
SAMPLES, SAMPLE_BYTES, SAMPLE_CHARACTERS = 20, 1 << 20, 4000


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder."""

    path: Path
    config: Config | None
    metrics: list[dict[str, Any]]
    """One record per iteration, in order; of a step that was computed again after a failure, the last record."""
    repeated: int
    """Logged iterations that were computed again."""
    events: list[dict[str, Any]]
    """In order of time."""
    checkpoints: list[dict[str, Any]]
    """As `disk_facts` gives them, newest first."""
    latest: str
    """Name of the step folder that `checkpoints/latest` names."""
    problems: list[str]
    """What is wrong with the files of the folder, except the checkpoints."""
    notes: list[str]
    """What was skipped without harm: torn lines, which a full disk or a power cut leaves."""
    samples: list[dict[str, str]]
    """Generated texts, newest first: source (a step or the name of a file), prompt, completion."""
    rank_times: list[list[float]]
    """Milliseconds of every rank, per logged iteration; empty where none were recorded."""

    def series(self, key: str, factor: float = 1.0) -> Series:
        """(iteration, value) of the records that have a finite value (JSON has no other numbers)."""
        found = ((record["iteration"], record.get(key)) for record in self.metrics)
        return [(iteration, value * factor) for iteration, value in found if isinstance(value, int | float)]

    def median(self, key: str) -> float | None:
        """Median without the first logged iteration, which includes kernel start-up and compilation."""
        values = [value for _, value in self.series(key)]
        return statistics.median(values[1:] or values) if values else None

    def last(self, key: str) -> Any:
        return self.metrics[-1].get(key) if self.metrics else None

    def events_named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    @property
    def incidents(self) -> int:
        """Number of failures; all records before the restart count as one."""
        count, open_ = 0, False
        for event in self.events:
            if event["event"] == "failure":
                count, open_ = count + (not open_), True
            elif event["event"] in ("resumed", "started"):
                open_ = False
        return count

    @property
    def state(self) -> str:
        """The state of the run, from its last start, failure or end."""
        for event in reversed(self.events):
            if event["event"] == "finished":
                return "stopped" if event.get("stopped") else "finished"
            if event["event"] == "failure":
                return "failed"
            if event["event"] in ("resumed", "started"):
                return "under way"
        return "unknown"


def read_run(path: Path | str) -> RunRecord:
    """The run in a folder, finished or not."""
    folder = Path(path)
    if not folder.is_dir():
        raise HoldfastError(f"there is no run folder {folder}")
    if not is_run_folder(folder):
        inside = ", ".join(map(str, run_folders_in(folder)[:5]))
        hint = f"; run folders in it: {inside}" if inside else ""
        raise HoldfastError(f"{folder} is not a run folder: it has no config.toml, metrics.jsonl or events.jsonl{hint}")
    problems: list[str] = []
    notes: list[str] = []
    config = _config(folder / "config.toml", problems)
    metrics, repeated = _last_per_iteration(_records(folder / "metrics.jsonl", problems, notes))
    events = [
        event
        for event in _records(folder / "events.jsonl", problems, notes)
        if isinstance(event.get("event"), str) and isinstance(event.get("time"), int | float)
    ]
    events.sort(key=lambda event: float(event["time"]))
    checkpoints = disk_facts(folder)
    latest = _latest(folder, checkpoints, problems)
    evaluations = _evaluation_samples(_records(folder / "samples.jsonl", problems, notes))
    samples = [*_sample_files(folder), *evaluations][:SAMPLES]
    times = read_rank_times(folder / "rank_times.jsonl") if (folder / "rank_times.jsonl").is_file() else []
    return RunRecord(folder, config, metrics, repeated, events, checkpoints, latest, problems, notes, samples, times)


def _config(path: Path, problems: list[str]) -> Config | None:
    if not _readable(path, problems):
        return None
    try:
        return read_config(path)
    except (HoldfastError, OSError) as error:
        problems.append(f"the configuration cannot be read: {error}")
        return None


def _records(path: Path, problems: list[str], notes: list[str]) -> list[dict[str, Any]]:
    if not _readable(path, problems):
        return []
    try:
        records = list(read_journal(path))
        with path.open("rb") as file:
            torn = sum(1 for line in file if line.strip()) - len(records)
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return []
    if torn > 0 and not records:
        problems.append(f"{path} is damaged: none of its {torn:,} lines is a record")
    elif torn > 0:
        notes.append(f"{count_of(torn, 'torn line')} of {path.name} skipped")
    return records


def _readable(path: Path, problems: list[str]) -> bool:
    """Whether the path is a regular file. Anything else is a problem: a fifo would block the reader."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        problems.append(f"{path} is not a regular file")
    return False


def _last_per_iteration(records: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The last record of each iteration, and how many were dropped. A resume drops what was logged after its step."""
    kept: list[dict[str, Any]] = []
    repeated = 0
    for record in map(numbers_of, records):
        if not isinstance(record.get("iteration"), int) or record["iteration"] < 0:
            continue
        while kept and kept[-1]["iteration"] >= record["iteration"]:
            kept.pop()
            repeated += 1
        kept.append(record)
    return kept, repeated


def _latest(folder: Path, checkpoints: list[dict[str, Any]], problems: list[str]) -> str:
    """The name of the step folder that `checkpoints/latest` names."""
    path = folder / "checkpoints" / LATEST
    try:
        name = path.read_text(encoding="utf-8", errors="replace").strip() if _readable(path, problems) else ""
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return ""
    if name and not any(Path(checkpoint["path"]).name == Path(name).name for checkpoint in checkpoints):
        problems.append(f"{path} names {name[:100]!r}, which does not exist")
    return Path(name).name


def _evaluation_samples(records: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Texts that evaluations of the run wrote, newest step first; of equal steps and prompts the last one counts."""
    found: dict[tuple[int, str], str] = {}
    for record in records:
        step, prompt, completion = (record.get(key) for key in ("step", "prompt", "completion"))
        if isinstance(step, int) and isinstance(prompt, str) and isinstance(completion, str):
            found[step, prompt] = completion[:SAMPLE_CHARACTERS]
    newest = sorted(found.items(), key=lambda item: -item[0][0])
    return [{"source": f"step {step:,}", "prompt": prompt, "completion": text} for (step, prompt), text in newest]


def _sample_files(folder: Path) -> list[dict[str, str]]:
    """Texts that `holdfast generate RUN --json` wrote to files in `samples/`. Other content is skipped."""
    found: list[dict[str, str]] = []
    files = [path for path in folder.glob("samples/*.json") if path.is_file() and path.stat().st_size < SAMPLE_BYTES]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            texts = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            continue
        for text in texts if isinstance(texts, list) else []:
            if isinstance(text, dict) and isinstance(text.get("completion"), str):
                prompt, completion = str(text.get("prompt", "")), text["completion"]
                found.append({"source": path.stem, "prompt": prompt, "completion": completion[:SAMPLE_CHARACTERS]})
    return found
