"""The page: one HTML file that loads nothing else. Text from the run folder is escaped."""

from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from holdfast.config import Config, config_to_toml
from holdfast.report.chart import NARROW, Chart, Curve, Marker, compact_number, timeline
from holdfast.report.description import moment
from holdfast.report.events import as_int, describe_event, describe_events, duration, repeated_steps
from holdfast.report.run_record import RunRecord, downsampled, smoothed
from holdfast.snapshot.report import size_text

# Event → lane of the timeline and style. Other events get a lane of their own.
LANES = {
    "started": ("run", "main"),
    "finished": ("run", "main"),
    "failure": ("failures", "bad"),
    "refused": ("failures", "bad"),
    "resumed": ("resumes", "good"),
    "snapshot": ("snapshots", "warn"),
    "persisted": ("on disk", "third"),
}


def render(run: RunRecord) -> str:
    """The whole page as text."""
    name = run.path.resolve().name
    asset = files("holdfast.report")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)} · holdfast</title>
<style>{asset.joinpath("page.css").read_text()}</style>
</head>
<body><main>
<header><h1>{escape(name)}<span class="state {run.state.split()[0]}">{escape(run.state)}</span></h1>
<p>{escape(_subtitle(run))}</p></header>
{_problems(run)}
{_tiles(run)}
{_charts(run)}
{_events(run)}
{_checkpoints(run)}
{_configuration(run.config)}
<footer>Drawn by holdfast report on {moment(datetime.now(UTC).timestamp())} UTC from {escape(str(run.path))}</footer>
</main>
<script>{asset.joinpath("page.js").read_text()}</script>
</body></html>
"""


def _subtitle(run: RunRecord) -> str:
    parts = []
    if run.config is not None:
        model, data = run.config.model, run.config.data
        parts.append(
            f"{model.model_type.upper()}, {model.num_layers} layers × {model.hidden_size}, {model.num_attention_heads} heads, "
            f"sequences of {data.seq_length}"
        )
    worlds = [event["world"] for event in run.events_named("started") if "world" in event]
    if worlds:
        parts.append(f"{worlds[-1]} rank{'' if worlds[-1] == 1 else 's'}")
    if run.events:
        first, last = float(run.events[0]["time"]), float(run.events[-1]["time"])
        parts.append(f"{moment(first)} UTC, {duration(last - first)} until the last event")
    return " · ".join(parts)


def _problems(run: RunRecord) -> str:
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    return f'<ul class="problems bad-text">{listed}</ul>' if listed else ""


def _tiles(run: RunRecord) -> str:
    """The main numbers of the run."""
    validation = run.series("validation_loss")
    lost = sum(as_int(event.get("steps_lost")) or 0 for event in run.events_named("resumed"))
    stall, step = run.median("snapshot_stall_ms"), run.median("step_ms")
    tiles = [("training loss", _number(run.last("loss")), f"at iteration {run.last('iteration') or 0:,}")]
    if validation:
        best = min(validation, key=lambda point: point[1])
        tiles.append(("validation loss", f"{validation[-1][1]:.4g}", f"best {best[1]:.4g} at {best[0]:,}"))
    tiles.append(("tokens seen", compact_number(float(run.last("consumed_tokens") or 0)), ""))
    speed, tflops, mfu = run.median("tokens_per_s"), run.median("tflops"), run.median("mfu")
    tiles.append(("tokens/s, median", _number(speed), f"{step:,.4g} ms per step" if step else ""))
    if mfu is not None:
        tiles.append(("MFU, median", f"{mfu:.1%}", f"{_number(tflops)} TFLOP/s per rank"))
    failures = "failures survived" if run.state != "failed" else "failures"
    tiles.append((failures, str(run.incidents), repeated_steps({"steps_lost": lost})))
    if stall:
        tiles.append(("snapshot stall", f"{stall:.3g} ms", f"{stall / step:.2%} of a step" if step else ""))
    drawn = (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><i>{escape(note)}</i></div>'
        for label, value, note in tiles
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _number(value: Any) -> str:
    return compact_number(float(f"{value:.4g}")) if isinstance(value, int | float) else "–"


def _charts(run: RunRecord) -> str:
    entries = [describe_event(event) for event in run.events_named("resumed")]
    marks = [Marker(entry.step or 0, "good", entry.text) for entry in entries]
    loss, validation = run.series("loss"), run.series("validation_loss")
    lines = [Curve("training", downsampled(loss), "main")]
    if len(loss) > 60:
        smooth = Curve("training, smoothed", downsampled(smoothed(loss, max(8, len(loss) // 100))), "main")
        lines = [Curve("training", downsampled(loss), "raw"), smooth]
    if validation:
        lines.append(Curve("validation", downsampled(validation), "second", dots=len(validation) <= 60))
    wide = Chart("Loss", "nats", lines, marks, height=320, width=980, axis="loss (nats)")

    def small(
        title: str, key: str, unit: str, axis: str, factor: float = 1, style: str = "main", hint: str = ""
    ) -> str:
        line = Curve(title.lower(), downsampled(run.series(key, factor)), style)
        shown = marks if key != "lr" else []
        return _card(Chart(title, unit, [line], shown, height=220, from_zero=True, axis=axis, hint=hint))

    cards = [
        small("Learning rate", "lr", "", "learning rate"),
        small("Gradient norm", "grad_norm", "", "L2 norm"),
        small("Throughput", "tokens_per_s", "tokens/s", "tokens/s, all ranks"),
        small("Step time", "step_ms", "ms", "ms per step"),
        small("Model FLOPs utilisation", "mfu", "%", "% of the device's peak", 100)
        if run.series("mfu")
        else small("Arithmetic", "tflops", "TFLOP/s", "TFLOP/s per rank", hint="the device's peak is unknown"),
        small(
            "Snapshot stall",
            "snapshot_stall_ms",
            "ms",
            "ms per step",
            style="third",
            hint="time a step waits for its snapshot",
        ),
    ]
    return f'<div class="charts">{_card(wide, "wide", legend=True)}{"".join(cards)}</div>'


def _card(chart: Chart, style: str = "", legend: bool = False) -> str:
    entries = ""
    if legend:
        entries = "".join(f'<li class="{line.style}">{escape(line.name)}</li>' for line in chart.lines)
        entries += '<li class="good">resumed</li>' if chart.marks else ""
        entries = f'<ul class="legend">{entries}</ul>'
    heading = f"<h2>{escape(chart.title)}" + (f"<small>{escape(chart.hint)}</small>" if chart.hint else "") + "</h2>"
    drawn = chart.svg()
    if style == "wide":
        drawn = replace(chart, style="on-wide").svg() + replace(chart, style="on-narrow", width=NARROW).svg()
    return f'<div class="card {style}">{heading}{entries}{drawn}</div>'


def _events(run: RunRecord) -> str:
    if not run.events:
        return ""
    start = float(run.events[0]["time"])
    rows = []
    for entry in describe_events(run.events):
        since = duration(entry.time - start)
        step = "" if entry.step is None else f"{entry.step:,}"
        rows.append(
            f'<tr><td class="time" title="{since} after the first event">{moment(entry.time)}</td>'
            f'<td class="kind {entry.style}-text">{escape(entry.kind)}</td><td class="number">{step}</td>'
            f'<td class="text">{escape(entry.text)}</td></tr>'
        )
    again = f"<small>{run.repeated} logged iterations were computed again</small>" if run.repeated else ""
    head = '<tr class="head"><th>time, UTC</th><th>event</th><th class="number">step</th><th>what happened</th></tr>'
    shown = _table(rows, head, "events")
    return f'<section class="events"><h2>Events {again}</h2><div class="card">{_timeline(run)}</div>{shown}</section>'


def _timeline(run: RunRecord) -> str:
    lanes: dict[str, tuple[str, list[tuple[float, str]]]] = {}
    for lane, style in LANES.values():
        lanes.setdefault(lane, (style, []))
    start, end = float(run.events[0]["time"]), float(run.events[-1]["time"])
    for event in run.events:
        lane, style = LANES.get(event["event"], (event["event"], "main"))
        entry = describe_event(event)
        lanes.setdefault(lane, (style, []))[1].append(
            (entry.time, f"{entry.text}, {duration(entry.time - start)} after the start")
        )
    used = [(lane, style, events) for lane, (style, events) in lanes.items() if events]
    return timeline(used, start, end, style="on-wide") + timeline(used, start, end, NARROW, "on-narrow")


def _table(rows: list[str], head: str, what: str, most: int = 40) -> str:
    """A card with a table. Of a long table the last rows are shown, and the others fold."""
    table = f'<div class="scroll"><table>{head}{"".join(rows[-most:])}</table></div>'
    if len(rows) <= most:
        return f'<div class="card" style="margin-top:14px">{table}</div>'
    earlier = f'<div class="scroll"><table>{head}{"".join(rows[:-most])}</table></div>'
    fold = f"<details><summary>{len(rows) - most} earlier {what}</summary>{earlier}</details>"
    return f'<div class="card" style="margin-top:14px">{table}{fold}</div>'


def _checkpoints(run: RunRecord) -> str:
    if not run.checkpoints:
        return ""
    rows = []
    for found in reversed(run.checkpoints):
        name = Path(found["path"]).name
        notes = ["latest"] * (name == run.latest) + ["written from memory"] * (found["source"] == "memory")
        note = f'<span class="bad-text">{escape(found["trouble"])}</span>' if found["trouble"] else ", ".join(notes)
        size = size_text(found["bytes"]) if found["bytes"] else "–"
        rows.append(
            f'<tr><td class="number">{found["step"]:,}</td><td class="folder">{escape(name)}</td><td class="number">'
            f'{size}</td><td class="number">{found["world"] or "–"}</td><td>{note}</td></tr>'
        )
    columns = {"step": "number", "folder": "folder", "size": "number", "ranks": "number", "": ""}
    head = "".join(f'<th class="{style}">{name}</th>' for name, style in columns.items())
    head = f"<tr>{head}</tr>"
    return f"<section><h2>Checkpoints on disk</h2>{_table(rows, head, 'checkpoints')}</section>"


def _configuration(config: Config | None) -> str:
    if config is None:
        return ""
    train, optimizer, parallel = config.train, config.optimizer, config.parallel
    precision = "bf16" if train.bf16 else "fp16" if train.fp16 else "fp32"
    length = f"{train.train_iters:,} iterations" if train.train_iters else f"{train.train_samples or 0:,} samples"
    layout = (
        f"tensor {parallel.tensor_model_parallel_size} × pipeline {parallel.pipeline_model_parallel_size}, "
        f"{parallel.nnodes} × {parallel.nproc_per_node} ranks started"
    )
    interval = config.snapshot.snapshot_interval
    facts = {
        "length": length,
        "global batch": f"{train.global_batch_size or '–'} (micro batch {train.micro_batch_size})",
        "precision": precision,
        "optimizer": f"{optimizer.optimizer}, lr {optimizer.lr:g} → {optimizer.min_lr:g}, {optimizer.lr_decay_style}",
        "decay and clipping": f"weight decay {optimizer.weight_decay:g}, clip {optimizer.clip_grad:g}",
        "layout": layout,
        "vocabulary": f"{config.model.vocab_size or '–'}",
        "data": ", ".join(str(part) for part in config.data.data_path) or "–",
        "seed": str(train.seed),
        "snapshots": {0: "none", 1: "after every step"}.get(interval, f"every {interval} steps"),
    }
    listed = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    complete = (
        f"<details><summary>the complete configuration</summary><pre>{escape(config_to_toml(config))}</pre></details>"
    )
    return f'<section><h2>Configuration</h2><div class="card"><dl>{listed}</dl>{complete}</div></section>'
