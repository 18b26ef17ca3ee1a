"""How a run spent its wall time: steps that count, and time lost by cause.

Each share is computed from metrics.jsonl and events.jsonl alone. What they do not record is named in `unknown`, and the
time that no cause explains is `other`.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from holdfast.report.run_record import RunRecord

CAUSES = {
    "useful": "steps that count towards the result",
    "restart": "from a failure to the resume after it",
    "replay": "steps computed again after a resume",
    "stall": "steps waiting for their snapshot",
    "evaluation": "validation",
    "compile": "the first step of each start, beyond a usual step",
    "other": "start-up, saves, and time until a failure was noticed",
}


@dataclass(frozen=True)
class Goodput:
    """Seconds by cause; they add up to `total`, the wall time of the run without the time after it was stopped."""

    total: float
    seconds: dict[str, float]
    unknown: list[str]

    @property
    def share(self) -> float:
        """Useful time divided by wall time."""
        return self.seconds["useful"] / self.total


def goodput(run: RunRecord) -> Goodput | None:
    """None for a run without events or steps."""
    steps, usual = _steps(run), run.median("step_ms")
    total = _wall_time(run)
    if not steps or usual is None or total <= 0:
        return None
    seconds = dict.fromkeys(CAUSES, 0.0)
    starts = _start_steps(run)
    for (count, first), record in zip(steps, run.metrics, strict=True):
        step_ms = _number(record, "step_ms") or usual
        stall_ms = min(_number(record, "snapshot_stall_ms"), step_ms)
        # Of the records after a start, the first one contains the compilation.
        compiled = max(0.0, step_ms - usual) * min(count, record["iteration"] - first) if first in starts else 0.0
        starts.discard(first)
        seconds["stall"] += stall_ms * count / 1e3
        seconds["compile"] += compiled / 1e3
        seconds["useful"] += max(0.0, (step_ms - stall_ms) * count - compiled) / 1e3
        seconds["evaluation"] += _number(record, "evaluation_ms") / 1e3
    seconds["restart"] = _restart_seconds(run.events)
    lost = sum(_number(event, "steps_lost") for event in run.events_named("resumed"))
    seconds["replay"] = lost * usual / 1e3
    seconds["other"] = total - sum(seconds.values())
    if seconds["other"] < 0:  # times of steps are means, so the sum may exceed the wall time slightly
        total, seconds["other"] = total - seconds["other"], 0.0
    return Goodput(total, seconds, _unknown(run))


def _number(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _start_steps(run: RunRecord) -> set[int]:
    """The steps after which a start began to compute."""
    return {0} | {event["step"] for event in run.events_named("resumed") if isinstance(event.get("step"), int)}


def _steps(run: RunRecord) -> list[tuple[int, int]]:
    """For each record: the steps that it stands for, and the step after which its start began, or -1 if an earlier record of
    the same start exists."""
    starts = sorted(_start_steps(run))
    found = []
    previous = -1
    for record in run.metrics:
        iteration = record["iteration"]
        begun = starts[max(0, bisect_left(starts, iteration) - 1)]  # the last start before the record
        first = begun if begun >= previous else -1
        found.append((iteration - (previous if previous >= 0 else begun), first))
        previous = iteration
    return found


def _wall_time(run: RunRecord) -> float:
    logged = (_number(record, "time") for record in run.metrics)
    times = [float(event["time"]) for event in run.events] + [time for time in logged if time]
    if not run.events:
        return 0.0
    idle, ended = 0.0, None
    for event in run.events:
        if event["event"] == "finished":
            ended = float(event["time"])
        elif event["event"] == "started" and ended is not None:
            idle, ended = idle + float(event["time"]) - ended, None
    return max(times) - min(times) - idle


def _restart_seconds(events: Sequence[dict[str, Any]]) -> float:
    """Time between the first record of a failure and the resume (or the start, if nothing was resumed) after it."""
    total, failed = 0.0, None
    for index, event in enumerate(events):
        name, moment = event["event"], float(event["time"])
        if name == "failure":
            failed = moment if failed is None else failed
        elif name == "resumed" and failed is not None:
            total, failed = total + (_measured_restart(event) or moment - failed), None
        elif name == "started" and failed is not None:
            later = next((e["event"] for e in events[index + 1 :] if e["event"] != "snapshot"), "")
            if later != "resumed":
                total, failed = total + moment - failed, None
    return total


def _measured_restart(resumed: dict[str, Any]) -> float:
    """`seconds_since_failure` without the first step, which its record counts; 0 if it was not measured."""
    timeline = resumed.get("timeline")
    first_step = _number(timeline, "first step") if isinstance(timeline, dict) else 0.0
    return max(0.0, _number(resumed, "seconds_since_failure") - first_step)


def _unknown(run: RunRecord) -> list[str]:
    found = []
    if not any(_number(record, "time") for record in run.metrics):
        found.append("metrics.jsonl has no times: the wall time ends with the last event")
    if run.series("validation_loss") and not run.series("evaluation_ms"):
        found.append("the time of evaluations was not recorded and is part of other")
    if run.series("snapshot_stall_ms") and statistics.mean(_gaps(run)) > 1:
        found.append("snapshot stalls between two logged steps are taken to be like those of the logged ones")
    return found


def _gaps(run: RunRecord) -> list[int]:
    iterations = [record["iteration"] for record in run.metrics]
    return [later - earlier for earlier, later in pairwise(iterations)] or [1]
