"""What `train --json` prints when the run ends: where it is and how far it came, read from the run folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.system.journal import read_journal


@contextmanager
def print_result(save: str | None) -> Iterator[None]:
    """Prints the result when the block ends, also when the run was stopped on request. A failure prints none."""
    try:
        yield
    except SystemExit as stopped:
        if not stopped.code:
            _print(run_result(save))
        raise
    _print(run_result(save))


def run_result(save: str | None) -> dict[str, Any]:
    """`finished` is false for a run that was stopped; the same command continues it. Without a run folder only that is known."""
    if save is None:
        return {"run": None, "finished": True}
    folder = Path(save)
    metrics = list(read_journal(folder / "metrics.jsonl"))
    ends = [event for event in read_journal(folder / "events.jsonl") if event.get("event") == "finished"]
    latest = folder / "checkpoints" / "latest"
    return {
        "run": str(folder),
        "iteration": ends[-1].get("step") if ends else None,
        "loss": _last(metrics, "loss"),
        "validation_loss": _last(metrics, "validation_loss"),
        "finished": bool(ends) and not ends[-1].get("stopped"),
        "checkpoint": str(latest.parent / latest.read_text().strip()) if latest.exists() else None,
    }


def _last(records: list[Any], key: str) -> Any:
    return next((record[key] for record in reversed(records) if key in record), None)


def _print(result: dict[str, Any]) -> None:
    import orjson

    print(orjson.dumps(result).decode())
