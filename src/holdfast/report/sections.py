"""The parts of the page about one run: main numbers, goodput, events, checkpoints, samples, configuration. Text is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from holdfast.config import Config, config_to_toml
from holdfast.report.description import moment
from holdfast.report.goodput import CAUSES, Goodput, goodput
from holdfast.report.run_record import RunRecord
from holdfast.report.timeline import timeline
from holdfast.snapshot.report import size_text
from holdfast.system.progress import count_of
from holdfast.train.run_folder.events import as_int, describe_events, duration, repeated_steps

SHOWN_ROWS = 40


def subtitle(run: RunRecord) -> str:
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


def problem_list(problems: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<ul class="problems bad-text">{listed}</ul>' if listed else ""


def main_numbers(run: RunRecord) -> list[tuple[str, str, str]]:
    """(label, value, note) of the most important numbers of the run."""
    validation = run.series("validation_loss")
    lost = sum(as_int(event.get("steps_lost")) or 0 for event in run.events_named("resumed"))
    stall, step = run.median("snapshot_stall_ms"), run.median("step_ms")
    numbers = [("training loss", number(run.last("loss")), f"at iteration {run.last('iteration') or 0:,}")]
    if validation:
        best = min(validation, key=lambda point: point[1])
        numbers.append(("validation loss", f"{validation[-1][1]:.4g}", f"best {best[1]:.4g} at {best[0]:,}"))
    numbers.append(("tokens seen", compact_number(float(run.last("consumed_tokens") or 0)), ""))
    speed, tflops, mfu = run.median("tokens_per_s"), run.median("tflops"), run.median("mfu")
    numbers.append(("tokens/s, median", number(speed), f"{step:,.4g} ms per step" if step else ""))
    if mfu is not None:
        numbers.append(("MFU, median", f"{mfu:.1%}", f"{number(tflops)} TFLOP/s per rank"))
    failures = "failures survived" if run.state != "failed" else "failures"
    numbers.append((failures, str(run.incidents), repeated_steps({"steps_lost": lost})))
    if stall:
        numbers.append(("snapshot stall", f"{stall:.3g} ms", f"{stall / step:.2%} of a step" if step else ""))
    return numbers


def tiles(run: RunRecord) -> str:
    drawn = (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><i>{escape(note)}</i></div>'
        for label, value, note in main_numbers(run)
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def number(value: Any) -> str:
    return compact_number(float(f"{value:.4g}")) if isinstance(value, int | float) else "–"


def compact_number(value: float) -> str:
    """A number in a few characters: 12.3k, 1.2M, 3e-04."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.3g}".replace("e-0", "e-")


def goodput_bar(run: RunRecord, name: str = "") -> str:
    """Useful and lost time as one bar, with a legend that states each share."""
    found = goodput(run)
    heading = f"<h2>{escape(name)}" if name else "<h2>Goodput"
    if found is None:
        return f'{heading}</h2><p class="empty">no step was logged yet</p>'
    shown = {cause: seconds for cause, seconds in found.seconds.items() if seconds / found.total >= 5e-4}
    parts, legend, left = [], [], 0.0
    for cause, seconds in shown.items():
        width = 1000 * seconds / found.total
        text = f"{CAUSES[cause]}: {duration(seconds)}"
        parts.append(
            f'<rect class="{cause}" x="{left:.1f}" y="0" width="{width:.1f}" height="20"><title>{text}</title></rect>'
        )
        legend.append(
            f'<li class="{cause}" title="{text}">{cause} {seconds / found.total:.1%} <i>{duration(seconds)}</i></li>'
        )
        left += width
    bar = (
        f'<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{_in_words(found)}">'
    )
    notes = "".join(f"<li>{escape(text)}</li>" for text in found.unknown)
    return (
        f"{heading}<small>{found.share:.1%} of {duration(found.total)} went into steps that count</small></h2>"
        f'{bar}{"".join(parts)}</svg><ul class="legend goodput">{"".join(legend)}</ul>'
        + (f'<ul class="unknown">{notes}</ul>' if notes else "")
    )


def _in_words(found: Goodput) -> str:
    return ", ".join(f"{cause} {seconds / found.total:.1%}" for cause, seconds in found.seconds.items() if seconds)


def events(run: RunRecord) -> str:
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
    again = f"<small>computed again: {count_of(run.repeated, 'logged iteration')}</small>" if run.repeated else ""
    head = '<tr class="head"><th>time, UTC</th><th>event</th><th class="number">step</th><th>what happened</th></tr>'
    shown = table(rows, head, "events")
    return f'<section class="events"><h2>Events {again}</h2><div class="card">{timeline(run)}</div>{shown}</section>'


def table(rows: list[str], head: str, what: str) -> str:
    """A card with a table. Of a long table the last rows are shown, and the others fold."""
    shown = f'<div class="scroll"><table>{head}{"".join(rows[-SHOWN_ROWS:])}</table></div>'
    if len(rows) > SHOWN_ROWS:
        earlier = f'<div class="scroll"><table>{head}{"".join(rows[:-SHOWN_ROWS])}</table></div>'
        shown += f"<details><summary>{len(rows) - SHOWN_ROWS} earlier {what}</summary>{earlier}</details>"
    return f'<div class="card below">{shown}</div>'


def checkpoints(run: RunRecord) -> str:
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
    return f"<section><h2>Checkpoints on disk</h2>{table(rows, f'<tr>{head}</tr>', 'checkpoints')}</section>"


def samples(found: Sequence[Mapping[str, str]]) -> str:
    """Generated texts, newest first: the prompt in bold, the model's text after it."""
    if not found:
        return ""
    shown = "".join(
        f"<figure><figcaption>{escape(sample['source'])}</figcaption>"
        f"<pre><b>{escape(sample['prompt'])}</b>{escape(sample['completion'])}</pre></figure>"
        for sample in found
    )
    return f'<section><h2>Generated text</h2><div class="card samples">{shown}</div></section>'


def configuration(config: Config | None) -> str:
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
