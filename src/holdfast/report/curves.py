"""The curves of runs as data for the page: which charts there are, and the rows of each run, at most ROWS of them in all.

Python drops rows, the browser draws what is left: a longer run keeps, of each group of neighbouring rows, those with the
lowest and the highest loss, so that every point on the page was logged and no spike disappears. Rows with a validation loss stay.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.report.run_record import RunRecord
from holdfast.train.run_folder.events import describe_event

ROWS, FEWEST_ROWS = 20_000, 2_000
DIGITS = 6

COLUMNS = (
    "iteration", "consumed_tokens", "time", "loss", "validation_loss", "lr", "grad_norm", "tokens_per_s",
    "step_ms", "mfu", "tflops", "snapshot_stall_ms",
)  # fmt: skip
"""Values of a row, in this order; `time` is in seconds since the first event or row of the run."""


@dataclass(frozen=True)
class CurveChart:
    """A chart: one column of every run over the same axis."""

    title: str
    column: str
    axis: str
    """Label of the vertical axis, with its unit."""
    second: str = ""
    """A column that is drawn as points beside the first."""
    hint: str = ""
    from_zero: bool = True


CHARTS = (
    CurveChart("Loss", "loss", "loss (nats)", "validation_loss", from_zero=False),
    CurveChart("Learning rate", "lr", "learning rate"),
    CurveChart("Gradient norm", "grad_norm", "L2 norm"),
    CurveChart("Throughput", "tokens_per_s", "tokens/s, all ranks"),
    CurveChart("Step time", "step_ms", "ms per step"),
    CurveChart("Model FLOPs utilisation", "mfu", "share of the device's peak"),
    CurveChart("Arithmetic", "tflops", "TFLOP/s per rank", hint="the device's peak is unknown"),
    CurveChart("Snapshot stall", "snapshot_stall_ms", "ms per step", hint="time a step waits for its snapshot"),
)


def charts_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The charts that the page draws: TFLOP/s stand for the MFU where the peak of the device is unknown."""
    hidden = "tflops" if any(run.series("mfu") for run in runs) else "mfu"
    return [asdict(chart) for chart in CHARTS if chart.column != hidden]


def curves_of(run: RunRecord, name: str, runs: int = 1) -> dict[str, Any]:
    """One run for the page: its name, its rows, and its resumes and failures as marks."""
    start = _start(run)
    limit = max(FEWEST_ROWS, ROWS // runs)
    marks = []
    for event in run.events_named("resumed"):
        entry = describe_event(event)
        marks.append({"step": entry.step or 0, "time": round(entry.time - start, 2), "text": entry.text})
    return {"name": name, "rows": [_row(record, start) for record in thinned(run.metrics, limit)], "marks": marks}


def _start(run: RunRecord) -> float:
    times = [record["time"] for record in run.metrics[:1] if isinstance(record.get("time"), int | float)]
    return min([float(event["time"]) for event in run.events[:1]] + times, default=0.0)


def _row(record: dict[str, Any], start: float) -> list[float | int | None]:
    row: list[float | int | None] = []
    for column in COLUMNS:
        value = record.get(column)
        if not isinstance(value, int | float):
            row.append(None)
        elif column == "time":
            row.append(round(value - start, 3))
        else:
            row.append(value if isinstance(value, int) else float(f"{value:.{DIGITS}g}"))
    return row


def thinned(records: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most about `limit` records. Groups are as long as a power of two: while a run grows, the first rows rarely change."""
    size = 2
    while len(records) / size * 2 > limit:
        size *= 2
    if size == 2:
        return records
    kept: list[dict[str, Any]] = []
    for first in range(0, len(records), size):
        group = range(first, min(first + size, len(records)))
        losses = {
            index: records[index]["loss"] for index in group if isinstance(records[index].get("loss"), int | float)
        }
        chosen = {min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)} if losses else {first}
        chosen |= {index for index in group if "validation_loss" in records[index]}
        kept += [records[index] for index in sorted(chosen | ({len(records) - 1} & set(group)))]
    return kept
