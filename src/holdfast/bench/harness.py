"""The harness of every `bench NAME`: rounds in which contenders take turns, medians and ratios, tables, the machine.

Contenders take turns within a round, so that other load on the machine hits all of them alike; ratios are taken within a
round, and their median is reported. CPU seconds, summed over threads and processes, suffer least from a busy machine.
"""

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log

Row = dict[str, Any]
Tables = dict[str, list[Row]]
"""Title to rows; a row's keys are the columns."""
Sample = TypeVar("Sample")


def run_rounds(turns: Mapping[str, Callable[[], Sample]], rounds: int, label: str = "") -> dict[str, list[Sample]]:
    """Calls every contender's turn once per round; contender → its samples, one per round. `label` logs each round."""
    samples: dict[str, list[Sample]] = {name: [] for name in turns}
    for number in range(1, rounds + 1):
        for name, turn in turns.items():
            samples[name].append(turn())
        if label:
            log(f"{label}: round {number} of {rounds} done")
    return samples


def median(samples: Iterable[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(value(sample) for sample in samples)


def median_ratio(samples: Sequence[Sample], base: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    """The median over the rounds of a contender's value divided by the base's."""
    return statistics.median(value(one) / value(other) for one, other in zip(samples, base, strict=True))


def timed(action: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


@dataclass(frozen=True)
class ProcessCost:
    """Wall and CPU seconds and peak memory in bytes of a command and all processes that it starts."""

    wall: float
    cpu: float
    memory: int

    def __add__(self, later: "ProcessCost") -> "ProcessCost":
        return ProcessCost(self.wall + later.wall, self.cpu + later.cpu, max(self.memory, later.memory))


def run_process(name: str, command: Sequence[str]) -> ProcessCost:
    """Runs a contender's command to its end. Its peak memory is sampled, as the sum over its processes."""
    os.sync()  # a contender does not wait for what the one before it left to write
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, done = 0, threading.Event()

    def sample_memory() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, _resident_bytes(process.pid))

    sampler = threading.Thread(target=sample_memory)
    sampler.start()
    assert process.stderr is not None
    try:
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
    except BaseException:  # Ctrl-C
        process.kill()
        process.wait()
        raise
    finally:
        done.set()
        sampler.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise HoldfastError(f"{name} failed: {errors.decode(errors='replace').strip()[-500:]}")
    return ProcessCost(wall, usage.ru_utime + usage.ru_stime, peak)


def _resident_bytes(pid: int) -> int:
    """The memory of a process and its descendants; 0 for one that has ended."""
    folder = Path("/proc", str(pid))
    try:
        own = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [
            int(word) for task in (folder / "task").iterdir() for word in (task / "children").read_text().split()
        ]
    except (OSError, IndexError):
        return 0
    return own + sum(_resident_bytes(child) for child in children)


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str = "contender") -> None:
    """Refuses a misspelt name instead of leaving it out."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"there is no {what} '{name}'; there are: {', '.join(known)}")


def installed(peers: Mapping[str, str]) -> list[str]:
    """Those of the peers (name → module) whose package is installed; the others are logged."""
    missing = [name for name, module in peers.items() if not importlib.util.find_spec(module.partition(".")[0])]
    for name in missing:
        log(f"{name} is left out: {peers[name].partition('.')[0]} is not installed")
    return [name for name in peers if name not in missing]


def show(name: str, tables: Tables, as_json: bool) -> None:
    if as_json:
        json.dump({"bench": name, "machine": machine(), "tables": tables}, sys.stdout, indent=1)
        print()
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for title, rows in tables.items():
        print(f"\n{title}\n{table(rows)}")


def machine() -> dict[str, str | int]:
    """What every number depends on."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    }


def table(rows: list[Row]) -> str:
    """The rows in columns as wide as they need; keys that a row lacks stay empty."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = ([row.get(head, "") for head in heads] for row in rows)
    lines = [heads, *([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
