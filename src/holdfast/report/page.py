"""The page: one HTML file that needs nothing but itself. Whatever comes from the run folder is escaped."""

from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from holdfast.config import Config, config_to_toml
from holdfast.report.chart import Chart, Line, Mark, duration, short, timeline
from holdfast.report.reading import Checkpoint, Run, smoothed, thinned

# Lane of the timeline and style of each kind of event; kinds that are not named here get a lane of their own.
LANES = {
    "started": ("run", "main"),
    "submitted": ("run", "main"),
    "finished": ("run", "main"),
    "failure": ("failures", "bad"),
    "refused": ("failures", "bad"),
    "resumed": ("resumes", "good"),
    "snapshot": ("snapshots", "warn"),
    "persisted": ("on disk", "third"),
}
TEXT_STYLES = {"failure": "bad-text", "refused": "bad-text", "resumed": "good-text", "snapshot": "warn-text"}


def render(run: Run) -> str:
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
<p>{escape(_sentence(run))}</p></header>
{_tiles(run)}
{_charts(run)}
{_events(run)}
{_checkpoints(run.checkpoints)}
{_configuration(run.config)}
<footer>Drawn by holdfast report on {_moment(datetime.now(UTC).timestamp())} UTC from {escape(str(run.path))}</footer>
</main>
<script>{asset.joinpath("page.js").read_text()}</script>
</body></html>
"""


def _sentence(run: Run) -> str:
    parts = []
    if run.config is not None:
        model, data = run.config.model, run.config.data
        parts.append(
            f"{model.model_type.upper()}, {model.num_layers} layers × {model.hidden_size}, {model.num_attention_heads} heads, "
            f"sequences of {data.seq_length}"
        )
    worlds = [event["world"] for event in run.named("started") if "world" in event]
    if worlds:
        parts.append(f"{worlds[-1]} rank{'s' if worlds[-1] != 1 else ''}")
    if run.events:
        first, last = float(run.events[0]["time"]), float(run.events[-1]["time"])
        parts.append(f"{_moment(first)} UTC, {duration(last - first)} until the last event")
    return " · ".join(parts)


def _tiles(run: Run) -> str:
    """The few numbers one asks for first."""
    validation = run.series("validation_loss")
    lost = sum(int(event.get("steps_lost") or 0) for event in run.named("resumed"))
    stall, step = run.median("snapshot_stall_ms"), run.median("step_ms")
    tiles = [("training loss", _number(run.last("loss")), f"at iteration {run.last('iteration') or 0:,}")]
    if validation:
        best = min(validation, key=lambda point: point[1])
        tiles.append(("validation loss", f"{validation[-1][1]:.4g}", f"best {best[1]:.4g} at {best[0]:,}"))
    tiles.append(("tokens seen", short(float(run.last("consumed_tokens") or 0)), ""))
    speed, tflops, mfu = run.median("tokens_per_s"), run.median("tflops"), run.median("mfu")
    tiles.append(("tokens/s, median", _number(speed), f"{step:,.4g} ms per step" if step else ""))
    if mfu is not None:
        tiles.append(("MFU, median", f"{mfu:.1%}", f"{_number(tflops)} TFLOP/s per rank"))
    tiles.append(("failures survived" if run.state != "failed" else "failures", str(run.incidents), _lost(lost)))
    if stall:
        tiles.append(("snapshot stall", f"{stall:.3g} ms", f"{stall / step:.2%} of a step" if step else ""))
    drawn = (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><i>{escape(note)}</i></div>'
        for label, value, note in tiles
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _lost(steps: int) -> str:
    return "no step lost" if not steps else f"{steps} step{'s' if steps > 1 else ''} lost"


def _number(value: Any) -> str:
    return short(float(f"{value:.4g}")) if isinstance(value, int | float) else "–"


def _charts(run: Run) -> str:
    marks = [Mark(float(event.get("step") or 0), "good", _told(event)) for event in run.named("resumed")]
    loss, validation = run.series("loss"), run.series("validation_loss")
    lines = [Line("training", thinned(loss), "main")]
    if len(loss) > 60:
        smooth = Line("training, smoothed", thinned(smoothed(loss, max(8, len(loss) // 100))), "main")
        lines = [Line("training", thinned(loss), "raw"), smooth]
    if validation:
        lines.append(Line("validation", thinned(validation), "second", dots=len(validation) <= 60))
    wide = Chart("Loss", "", lines, marks, height=300, width=980)
    charts = [
        Chart("Learning rate", "", [Line("learning rate", thinned(run.series("lr")), "main")], from_zero=True),
        Chart("Gradient norm", "", [Line("norm", thinned(run.series("grad_norm")), "main")], marks, from_zero=True),
        Chart(
            "Throughput",
            "tokens/s",
            [Line("all ranks", thinned(run.series("tokens_per_s")), "main")],
            marks,
            from_zero=True,
        ),
        Chart("Step time", "ms", [Line("step", thinned(run.series("step_ms")), "main")], marks, from_zero=True),
    ]
    if run.series("mfu"):
        charts.append(
            Chart(
                "Model FLOPs utilisation", "%", [Line("MFU", thinned(run.series("mfu", 100)), "main")], from_zero=True
            )
        )
    else:
        tflops = [Line("TFLOP/s", thinned(run.series("tflops")), "main")]
        charts.append(
            Chart("Arithmetic", "TFLOP/s per rank", tflops, from_zero=True, hint="the device's peak is unknown")
        )
    stalls = [Line("stall", thinned(run.series("snapshot_stall_ms")), "third")]
    charts.append(
        Chart("Snapshot stalls", "ms", stalls, marks, from_zero=True, hint="what a step waited for its snapshot")
    )
    return f'<div class="charts">{_card(wide, "wide", legend=True)}{"".join(_card(chart) for chart in charts)}</div>'


def _card(chart: Chart, style: str = "", legend: bool = False) -> str:
    note = " · ".join(text for text in (chart.unit, chart.hint) if text)
    entries = ""
    if legend:
        entries = "".join(f'<li class="{line.style}">{escape(line.name)}</li>' for line in chart.lines)
        entries += '<li class="good">resumed</li>' if chart.marks else ""
        entries = f'<ul class="legend">{entries}</ul>'
    heading = f"<h2>{escape(chart.title)}" + (f"<small>{escape(note)}</small>" if note else "") + "</h2>"
    return f'<div class="card {style}">{heading}{entries}{chart.svg()}</div>'


def _events(run: Run) -> str:
    if not run.events:
        return ""
    lanes: dict[str, tuple[str, list[tuple[float, str]]]] = {}
    for lane, style in LANES.values():
        lanes.setdefault(lane, (style, []))
    rows = []
    start = float(run.events[0]["time"])
    for event in run.events:
        lane, style = LANES.get(event["event"], (str(event["event"]), "main"))
        told, since = _told(event), duration(float(event["time"]) - start)
        lanes.setdefault(lane, (style, []))[1].append((float(event["time"]), f"{event['event']} after {since}: {told}"))
        kind = f'<td class="kind {TEXT_STYLES.get(event["event"], "")}">{escape(str(event["event"]))}</td>'
        moment = f'<td class="time" title="{since} after the start">{_moment(event["time"])}</td>'
        rows.append(
            f'<tr>{moment}{kind}<td class="number">{escape(str(event.get("step", "")))}</td><td>{escape(told)}</td></tr>'
        )
    used = [(lane, style, events) for lane, (style, events) in lanes.items() if events]
    drawn = timeline(used, start, float(run.events[-1]["time"]))
    again = f"<small>{run.repeated} logged iterations were computed again</small>" if run.repeated else ""
    head = '<tr><th>time, UTC</th><th>event</th><th class="number">step</th><th>what happened</th></tr>'
    shown = _folded(rows, head, "events")
    return f'<section><h2>Events {again}</h2><div class="card">{drawn}</div>{shown}</section>'


def _folded(rows: list[str], head: str, what: str, most: int = 40) -> str:
    """A table; a long one shows its end and keeps the rest folded away."""
    table = f'<div class="scroll"><table>{head}{"".join(rows[-most:])}</table></div>'
    if len(rows) <= most:
        return f'<div class="card" style="margin-top:14px">{table}</div>'
    earlier = f'<div class="scroll"><table>{head}{"".join(rows[:-most])}</table></div>'
    fold = f"<details><summary>{len(rows) - most} earlier {what}</summary>{earlier}</details>"
    return f'<div class="card" style="margin-top:14px">{table}{fold}</div>'


def _told(event: dict[str, Any]) -> str:
    """An event's details in words."""
    known = {
        "time",
        "event",
        "step",
        "source",
        "steps_lost",
        "seconds",
        "path",
        "bytes",
        "cause",
        "rank",
        "kind",
        "ranks",
    }
    parts = []
    if event["event"] == "resumed":
        parts.append(f"from {event.get('source', 'unknown')}, {_lost(int(event.get('steps_lost') or 0))}")
    if event["event"] == "failure":
        parts.append(f"rank {event.get('rank', '?')} {event.get('kind', '')}".strip())
        parts.append(str(event.get("cause") or "no last words"))
    if event.get("path"):
        parts.append(str(event["path"]))
    if isinstance(event.get("bytes"), int | float):
        parts.append(_bytes(int(event["bytes"])))
    if isinstance(event.get("seconds"), int | float):
        parts.append(f"in {duration(float(event['seconds']))}")
    parts += [f"{key} {value}" for key, value in event.items() if key not in known and value not in (None, "", [])]
    return "; ".join(parts)


def _checkpoints(checkpoints: list[Checkpoint]) -> str:
    if not checkpoints:
        return ""
    rows = []
    for found in checkpoints:
        notes = ["latest"] if found.latest else []
        notes += ["written from memory"] if found.source == "memory" else []
        note = escape(", ".join(notes))
        if found.trouble:
            note = f'<span class="bad-text">{escape(found.trouble)}</span>'
        rows.append(
            f'<tr><td class="number">{found.step:,}</td><td>{escape(found.path.name)}</td><td class="number">'
            f'{_bytes(found.bytes)}</td><td class="number">{found.world or "–"}</td><td>{note}</td></tr>'
        )
    names = {"step": "number", "folder": "", "size": "number", "ranks": "number", "": ""}
    head = "".join(f'<th class="{style}">{name}</th>' for name, style in names.items())
    head = f"<tr>{head}</tr>"
    return f"<section><h2>Checkpoints on disk</h2>{_folded(rows, head, 'checkpoints')}</section>"


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
    whole = (
        f"<details><summary>the complete configuration</summary><pre>{escape(config_to_toml(config))}</pre></details>"
    )
    return f'<section><h2>Configuration</h2><div class="card"><dl>{listed}</dl>{whole}</div></section>'


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(float(seconds), UTC):%Y-%m-%d %H:%M:%S}"


def _bytes(size: int) -> str:
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size} B"
