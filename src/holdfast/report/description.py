"""The facts of `holdfast inspect RUN` as text of 80 columns."""

import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.snapshot.report import advice_lines, disk_lines, memory_lines
from holdfast.system.progress import count_of
from holdfast.train.run_folder.events import as_int, duration, one_line

WIDTH, LABEL = 80, 12


def description_lines(facts: dict[str, Any]) -> list[str]:
    sections = {
        "state": _state(facts),
        "model": _model(facts["model"]),
        "data": _data(facts["data"]),
        "tokenizer": _tokenizer(facts["data"]),
        "progress": _progress(facts),
        "loss": _losses(facts["loss"]),
        "validation": _losses(facts["validation_loss"]),
        "throughput": _throughput(facts["throughput"]),
        "restarts": str(facts["restarts"] or "none"),
        "failure": _failure(facts["last_failure"]),
        "refused": _failure(facts["last_refusal"]),
        "notes": "; ".join(facts["notes"]),
    }
    lines = [line for label, text in sections.items() if text for line in labelled(label, text)]
    return [*lines, *memory_lines(facts), *disk_lines(facts), *advice_lines(facts["next"])]


def labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:<{LABEL}}",
        subsequent_indent=" " * (LABEL + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _state(facts: dict[str, Any]) -> str:
    text = str(facts["state"])
    if facts["running"]:
        alive = sum(rank["alive"] for rank in facts["ranks"])
        claims = f", claimed by {', '.join(facts['claimed_by'])}" if facts["claimed_by"] else ""
        return f"{text}: {count_of(alive, 'rank')} on this host{claims}"
    event = facts["last_event"]
    return text + (f"; last event {moment(event['time'])} UTC" if event else "")


def _model(model: dict[str, Any] | None) -> str:
    if model is None:
        return "unknown: there is no readable config.toml and no checkpoint"
    parameters = model["parameters"]
    count = "an unknown number of parameters" if parameters is None else f"{parameters:,} parameters"
    if "family" not in model:
        return count
    vocabulary = "unknown vocabulary" if model["vocab_size"] is None else f"vocabulary of {model['vocab_size']:,}"
    return (
        f"{model['family'].upper()}, {model['num_layers']} layers × {model['hidden_size']}, "
        f"{model['num_attention_heads']} heads, {model['max_position_embeddings']:,} positions, {vocabulary}; "
        f"{count}, {model['precision']}"
    )


def _data(data: dict[str, Any] | None) -> str:
    if data is None:
        return ""
    where = " ".join(data["data_path"]) or "no data path"
    padding = "" if data["padding_share"] is None else f", {data['padding_share']:.2%} of them padding"
    return f"{where}, split {data['split']}, sequences of {data['seq_length']:,} tokens{padding}"


def _tokenizer(data: dict[str, Any] | None) -> str:
    if data is None:
        return ""
    files = [data[key] for key in ("vocab_file", "merge_file", "tokenizer_model") if data[key]]
    missing = [file for file in files if "/" in file and not Path(file).exists()]
    text = f"{data['tokenizer_type']}, {' '.join(files)}" if files else data["tokenizer_type"]
    return text + (f" (missing: {' '.join(missing)})" if missing else "")


def _progress(facts: dict[str, Any]) -> str:
    step, total = facts["step"], facts["train_iters"]
    if not step:
        return "never reached step 1" + (f" of {total:,}" if total else "")
    text = f"step {step:,}" + (f" of {total:,} ({step / total:.0%})" if total else "")
    samples = as_int(facts["consumed_samples"])
    if facts["train_samples"] and samples is not None:
        text += f", {samples:,} of {facts['train_samples']:,} samples"
    tokens = as_int(facts["consumed_tokens"])
    return text + (f", {tokens:,} tokens" if tokens is not None else "")


def _losses(losses: dict[str, Any] | None) -> str:
    if losses is None:
        return ""
    return ", ".join(f"{name} {at['value']:.4g} at {at['iteration']:,}" for name, at in losses.items())


def _throughput(medians: dict[str, Any]) -> str:
    if medians["tokens_per_s"] is None:
        return ""
    parts = [f"{medians['tokens_per_s']:,.0f} tokens/s"]
    parts += [f"{medians['step_ms']:,.1f} ms per step"] if medians["step_ms"] else []
    parts += [f"MFU {medians['mfu']:.1%}"] if medians["mfu"] is not None else []
    parts += [f"snapshot stall {medians['snapshot_stall_ms']:.2f} ms"] if medians["snapshot_stall_ms"] else []
    return ", ".join(parts) + " (medians)"


def _failure(failure: dict[str, Any] | None) -> str:
    return "" if failure is None else f"{moment(failure['time'])} UTC: {one_line(failure['text'])}"


def moment(seconds: float) -> str:
    """Date and time, UTC. A time outside the calendar is shown as a duration."""
    try:
        return f"{datetime.fromtimestamp(float(seconds), UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return duration(float(seconds))
