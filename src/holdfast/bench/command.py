"""What the verbs `bench NAME` share: the tables, the machine's description, and a check of names.

A measurement is a module with an options dataclass, `run(options) -> Tables`, and `bench(options)`, which shows the tables. A
line in cli.VERBS makes it a verb.
"""

import sys
from collections.abc import Iterable
from typing import Any

from holdfast.system.errors import UsageError

Tables = dict[str, list[dict[str, Any]]]
"""Title to rows; a row's keys are the columns."""


def show(name: str, tables: Tables, as_json: bool) -> None:
    if as_json:
        import json

        json.dump({"bench": name, "machine": machine(), "tables": tables}, sys.stdout, indent=1)
        print()
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for title, rows in tables.items():
        print(f"\n{title}\n{table(rows)}")


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str = "contender") -> None:
    """A measurement must not leave out in silence what was misspelt."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"there is no {what} '{name}'; there are: {', '.join(known)}")


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
