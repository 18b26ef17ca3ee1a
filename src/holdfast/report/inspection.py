"""`holdfast inspect RUN`: the run's model, progress, snapshots, checkpoints, failures, and what to do next."""

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from holdfast.checkpoint.manifest import read_manifest
from holdfast.config import Config, ParallelConfig
from holdfast.inspection import DocumentSamples, PathDescription
from holdfast.report.description import description_lines
from holdfast.report.run_record import RunRecord, read_run
from holdfast.snapshot.inspection import arena_troubles, disk_troubles
from holdfast.snapshot.memory.run_memory import MEMORY, run_memories
from holdfast.snapshot.report import disk_only_facts, is_run_folder, resume_advice, run_facts
from holdfast.system.errors import HoldfastError
from holdfast.train.run_folder.events import describe_event, last_failure

VERIFIED_BYTES = 8e9
"""Checksums of up to this many bytes of checkpoints are compared, newest first; of the others only the sizes."""
RECENT_SECONDS = 60.0


def recognises(path: Path) -> bool:
    return path.is_dir() and is_run_folder(path)


def describe(path: Path, samples: DocumentSamples) -> PathDescription:
    run = read_run(path)
    memory = run.config.snapshot.snapshot_dir if run.config else MEMORY
    run_memory = next((found for found in run_memories(memory) if found.folder == path.resolve()), None)
    if run_memory is not None:
        held = run_facts(run_memory, verify=True, verify_disk_bytes=VERIFIED_BYTES)
    else:
        held = disk_only_facts(path, VERIFIED_BYTES)
    facts: dict[str, Any] = {**held, **_state(run, held)}
    facts |= {
        "model": _model(run.config, held["checkpoints"]),
        "data": _data(run),
        **_progress(run, facts),
        "loss": _losses(run, "loss"),
        "validation_loss": _losses(run, "validation_loss"),
        "throughput": {
            key: run.median(key) for key in ("tokens_per_s", "step_ms", "tflops", "mfu", "snapshot_stall_ms")
        },
        "events": dict(Counter(str(event["event"]) for event in run.events)),
        "last_event": run.events[-1] if run.events else None,
        "notes": run.notes + _not_finite(run),
    }
    facts["next"] = _next(facts)
    problems = run.problems + arena_troubles(held["arenas"] + held["peer_copies"]) + disk_troubles(held)
    return PathDescription(facts, description_lines(facts), problems)


def _state(run: RunRecord, held: dict[str, Any]) -> dict[str, Any]:
    """Whether the run is running, and how it failed. `running` is None when another host may be running it."""
    running: bool | None = bool(held["claimed_by"]) or any(rank["alive"] for rank in held["ranks"])
    state = {"under way": "interrupted", "unknown": "never started"}.get(run.state, run.state)
    if running:
        state = "running"
    elif state == "interrupted":
        files = [run.path / name for name in ("metrics.jsonl", "events.jsonl")]
        if time.time() - max(file.stat().st_mtime for file in files if file.is_file()) < RECENT_SECONDS:
            running, state = None, "running on another host, or interrupted less than a minute ago"
    failed = last_failure(run.events)
    # a refusal is shown unless a later attempt succeeded
    last_success = max(
        (event["time"] for event in run.events_named("started", "resumed", "persisted", "finished")), default=0.0
    )
    refused = [event for event in run.events_named("refused") if event["time"] >= last_success]
    return {
        "state": state,
        "running": running,
        "restarts": max(0, len(run.events_named("started")) - 1),
        "failures": run.incidents,
        "last_failure": {**failed[0], "text": failed[1]} if failed else None,
        "last_refusal": {**refused[-1], "text": describe_event(refused[-1]).text} if refused else None,
    }


def _model(config: Config | None, checkpoints: list[dict[str, Any]]) -> dict[str, Any] | None:
    parameters = _saved_parameters(checkpoints)
    if config is None:
        return {"parameters": parameters} if parameters else None
    model, train = config.model, config.train
    return {
        "family": model.model_type,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings or config.data.seq_length,
        "vocab_size": model.vocab_size,
        "parameters": parameters or _built_parameters(config),
        "precision": "bf16" if train.bf16 else "fp16" if train.fp16 else "fp32",
    }


def _saved_parameters(checkpoints: list[dict[str, Any]]) -> int | None:
    for entry in checkpoints:
        if entry["bytes"]:  # the manifest could be read
            tensors = read_manifest(entry["path"]).tensors
            return sum(math.prod(shape) for name, (_, shape) in tensors.items() if name.startswith("model.")) or None
    return None


def _built_parameters(config: Config) -> int | None:
    """Parameters of the configured model, which is built without memory for its weights."""
    if config.model.vocab_size is None:
        return None
    from holdfast.train.model_families import build_stage

    tensor = config.parallel.tensor_model_parallel_size
    try:
        whole = build_stage(replace(config, parallel=ParallelConfig()), 0, tensor, config.model.vocab_size)
    except (HoldfastError, ValueError, RuntimeError):
        return None  # `train` reports the cause
    return sum(parameter.numel() for parameter in whole.parameters())


def _data(run: RunRecord) -> dict[str, Any] | None:
    config = run.config
    if config is None:
        return None
    keys = ("split", "seq_length", "packing", "tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")
    facts = {key: getattr(config.data, key) for key in keys}
    return {"data_path": list(config.data.data_path), **facts, "padding_share": run.last("padding_share")}


def _progress(run: RunRecord, facts: dict[str, Any]) -> dict[str, Any]:
    """The newest step of any record, rank, snapshot or checkpoint."""
    finished = [event.get("step") for event in run.events_named("finished")]
    steps = [run.last("iteration"), *finished[-1:], *facts["common_steps"][:1]]
    steps += [rank["step"] for rank in facts["ranks"]] + [entry["step"] for entry in facts["checkpoints"]]
    train = run.config.train if run.config else None
    return {
        "step": max((step for step in steps if isinstance(step, int)), default=0),
        "train_iters": train.train_iters if train else None,
        "train_samples": train.train_samples if train else None,
        "consumed_samples": run.last("consumed_samples"),
        "consumed_tokens": run.last("consumed_tokens"),
    }


def _losses(run: RunRecord, key: str) -> dict[str, Any] | None:
    """First, last and best value with their iterations; None if no finite value was logged."""
    series = run.series(key)
    if not series:
        return None
    shown = {"first": series[0], "last": series[-1], "best": min(series, key=lambda point: point[1])}
    return {name: {"iteration": iteration, "value": value} for name, (iteration, value) in shown.items()}


def _not_finite(run: RunRecord) -> list[str]:
    """A note if the last losses are not finite: JSON has no NaN or infinity, so they are logged as null."""
    numbers = [isinstance(record.get("loss"), int | float) for record in run.metrics]
    if not numbers or numbers[-1]:
        return []
    first = len(numbers) - numbers[::-1].index(True) if True in numbers else 0
    return [f"the loss has not been a finite number since iteration {run.metrics[first]['iteration']:,}"]


def _next(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(sentence, command) pairs in the order to follow; the command is "" where there is none."""
    advice = []
    sentence, command = resume_advice(facts)
    if (facts["model"] or {}).get("family") is None and command.endswith("config.toml"):
        advice.append(("repair config.toml, which cannot be read", ""))
    cause = (facts["last_failure"] or {}).get("cause") or (facts["last_refusal"] or {}).get("reason")
    killed = str(cause).startswith("killed by SIG")  # by a user or a scheduler: there may be nothing to correct
    if facts["state"] in ("failed", "never started") and cause and not killed:
        advice.append(("correct the cause of the failure", ""))
    advice.append((sentence, command))
    folder = quote(facts["folder"])
    if any(entry["trouble"] is None for entry in facts["checkpoints"]):
        advice.append(("to use the model elsewhere", f"holdfast convert {folder} DESTINATION --to hf"))
    if facts["loss"]:
        advice.append(("to see the curves", f"holdfast report {folder}"))
    return advice
