"""The verb `bench`: finds the measurement and shows its tables.

A measurement is a module with `run(*, against: tuple[str, ...] = ..., more flags) -> Tables`: tyro makes flags of its parameters
and help of its docstring. One line in BENCHES registers it.
"""

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from holdfast.errors import UsageError

Tables = dict[str, list[dict[str, Any]]]
"""Title to rows; a row's keys are the columns."""

BENCHES: dict[str, tuple[str, str]] = {
    "preprocess": ("holdfast.bench.preprocess", "text to .bin/.idx, compressed input, merging, reading at random"),
    "fetch": (
        "holdfast.bench.fetch",
        "64 processes fetch at once; the cost of a cached fetch; what waiters cost the holder",
    ),
    "generate": ("holdfast.bench.generate", "greedy texts at batch 1 and 8, beside Hugging Face's generate"),
    "snapshot": (
        "holdfast.bench.snapshot",
        "a snapshot at every step: its cost, its blocking part, the restore; beside torch.save and DCP",
    ),
    "train": (
        "holdfast.bench.train",
        "training steps on random tokens, beside a plain compiled GPT-2 and Hugging Face",
    ),
    "convert": (
        "holdfast.bench.convert",
        "a 345M release zip to a Hugging Face folder, beside a synced copy of the zip",
    ),
}


def bench(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return
    name, rest = arguments[0], arguments[1:]
    refuse_unknown([name], BENCHES, "bench")
    as_json = "--json" in rest
    import tyro

    run = importlib.import_module(BENCHES[name][0]).run
    rest = [argument for argument in rest if argument != "--json"]
    tables: Tables = tyro.cli(run, prog=f"holdfast bench {name}", args=rest, config=(tyro.conf.OmitArgPrefixes,))
    if as_json:
        import json

        json.dump({"bench": name, "machine": machine(), "tables": tables}, sys.stdout, indent=1)
        print()
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for title, rows in tables.items():
        print(f"\n{title}\n{table(rows)}")


bench.parses_its_own_arguments = True  # type: ignore[attr-defined]


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str = "contender") -> None:
    """A measurement must not leave out in silence what was misspelt."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"there is no {what} '{name}'; there are: {', '.join(known)}")


def help_text() -> str:
    lines = [f"  {name:<10}  {summary}" for name, (_, summary) in BENCHES.items()]
    return "\n".join(
        [
            "usage: holdfast bench NAME [--against PEER...] [--json]",
            "",
            "Measures a part of Holdfast beside what a user would pick instead, interleaved in one run.",
            "",
            *lines,
            "",
            "holdfast bench NAME --help shows a measurement's flags. For example:",
            "",
            "$ holdfast bench fetch",
            "$ holdfast bench fetch --against pooch --json",
        ]
    )


def machine() -> dict[str, str | int]:
    """What a number depends on and does not say."""
    import os
    import platform
    import time

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in columns as wide as they need; keys that a row lacks stay empty."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_shown(row.get(head, "")) for head in heads] for row in rows]
    widths = [max(len(line[at]) for line in [heads, *cells]) for at in range(len(heads))]
    lines = [[head.ljust(width) for head, width in zip(heads, widths, strict=True)]]
    lines += [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
