"""The result of a run, read from its folder: the last lines for the user and the object that `train --json` prints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import orjson

from holdfast.checkpoint.folder import checkpoints_in, latest_name
from holdfast.config import Config
from holdfast.system.journal import read_journal


def describe_end(config: Config) -> list[str]:
    """Lines for the user after all ranks ended without a failure: where the result is, and the commands that come next."""
    if config.train.save is None:
        return []
    folder = Path(config.train.save)
    word = quote(str(folder))
    finished = _finished_event(folder)
    if finished.get("stopped"):
        return [f"the same command continues from {folder}"]
    step, checkpoints = finished.get("step"), checkpoints_in(folder)
    if not checkpoints or step not in (None, checkpoints[-1][0]):
        newest = checkpoints[-1][1] if checkpoints else "none"
        return [f"warning: step {step} is not on disk (newest checkpoint: {newest}); see holdfast snapshots {word}"]
    lines = [f"result: {checkpoints[-1][1]}", "next:"]
    if config.model.model_type == "gpt":
        lines.append(f'  holdfast generate {word} --prompt "..."')
    return [*lines, f"  holdfast convert {word} {quote(f'{folder}-hf')} --to hf", f"  holdfast report {word}"]


@contextmanager
def print_result(save: str | None) -> Iterator[None]:
    """Prints the result as JSON when the block ends, also when the run was stopped on request. A failure prints none."""
    try:
        yield
    except SystemExit as stopped:
        if not stopped.code:
            print(orjson.dumps(run_result(save)).decode())
        raise
    print(orjson.dumps(run_result(save)).decode())


def run_result(save: str | None) -> dict[str, Any]:
    """`finished` is false for a run that was stopped; the same command continues it. A run without a folder has no other key."""
    if save is None:
        return {"run": None, "finished": True}
    folder = Path(save)
    metrics = list(read_journal(folder / "metrics.jsonl"))
    finished = _finished_event(folder)
    checkpoints = folder / "checkpoints"
    latest = latest_name(checkpoints)
    return {
        "run": str(folder),
        "iteration": finished.get("step"),
        "loss": _last(metrics, "loss"),
        "validation_loss": _last(metrics, "validation_loss"),
        "finished": bool(finished) and not finished.get("stopped"),
        "checkpoint": str(checkpoints / latest) if latest is not None else None,
    }


def _finished_event(folder: Path) -> dict[str, Any]:
    """The newest `finished` event of the run; empty if there is none."""
    events = read_journal(folder / "events.jsonl")
    return next((event for event in reversed(list(events)) if event.get("event") == "finished"), {})


def _last(records: list[dict[str, Any]], key: str) -> Any:
    return next((record[key] for record in reversed(records) if key in record), None)
