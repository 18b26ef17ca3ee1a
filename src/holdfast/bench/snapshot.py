"""`bench snapshot`: what a snapshot at every step costs, and how fast a restore is, beside torch's own saves.

The ranks train in processes of their own, which end as a crash does; fresh processes restore. Blocks of steps with and
without snapshots take turns.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.bench.harness import Tables, refuse_unknown, show
from holdfast.system.errors import HoldfastError

PEERS = ("torch.save", "dcp.save", "dcp.async_save")
SHAPES: dict[str, dict[str, int]] = {
    "small": {"layers": 4, "width": 256, "heads": 4, "positions": 128, "vocabulary": 8192, "batch": 4},
    "345m": {"layers": 24, "width": 1024, "heads": 16, "positions": 1024, "vocabulary": 50304, "batch": 32},
}


@dataclass(frozen=True, kw_only=True)
class SnapshotBench:
    """Measure the cost of a snapshot at every step, its blocking part, and the restore from memory.

    Examples:

      holdfast bench snapshot --model small
      holdfast bench snapshot --against torch.save --rounds 2 --json
    """

    against: tuple[str, ...] = PEERS
    """Peers in the same run."""
    model: Literal["auto", "small", "345m"] = "auto"
    """A GPT of 345 million parameters (auto, with CUDA) or of 5 million (auto, without)."""
    steps: int = 20
    """Steps in a block."""
    rounds: int = 5
    """Blocks with and without snapshots, each."""
    compile: bool = True
    """torch.compile the model (CUDA only)."""
    snapshot_dir: str = "/dev/shm"
    """Memory file system for the snapshots."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: SnapshotBench) -> None:
    show("snapshot", run(options), options.json)


def run(options: SnapshotBench) -> Tables:
    import torch

    refuse_unknown(options.against, PEERS)
    cuda = torch.cuda.is_available()
    name = options.model if options.model != "auto" else "345m" if cuda else "small"
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    world = 1 if cuda else 2
    task = {
        "shape": SHAPES[name],
        "cuda": cuda,
        "compile": options.compile and cuda,
        "steps": options.steps,
        "rounds": options.rounds,
        "against": list(options.against),
        "memory": options.snapshot_dir,
        "work": str(work),
        "world": world,
    }
    try:
        trained = _children("train", task, world)
        restored = _children("restore", task, world)
    finally:
        _clean(work, options.snapshot_dir)
    return _tables(trained, restored, name, world)


def _children(what: str, task: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Runs the ranks of one part in processes of their own; returns their answers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path])), "OMP_NUM_THREADS": "1"}
    if task["cuda"]:
        environment.pop("OMP_NUM_THREADS")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "holdfast.bench.snapshot_ranks", what, json.dumps(task), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    answers = []
    for process in processes:
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise HoldfastError(f"the {what} part of the bench failed with exit code {process.returncode}")
        answers.append(json.loads(lines[-1]))
    return answers


def _tables(trained: list[dict[str, Any]], restored: list[dict[str, Any]], name: str, world: int) -> Tables:
    first, seconds = trained[0], max(answer["restore_s"] for answer in restored)
    state, plain, held = first["state_bytes"], first["plain_ms"], first["held_ms"]
    steps = [
        {
            "model": name,
            "parameters": first["parameters"],
            "ranks": world,
            "state GB": state / 1e9,
            "step ms": plain,
            "with snapshots ms": held,
            "ratio": held / plain,
            "blocking ms (median)": first["stall_ms"],
            "blocking ms (95%)": first["stall_p95_ms"],
            "host waits ms": first["wait_ms"],
            "copy of own share ms": first["memcpy_ms"],
            "blocking/copy": first["stall_ms"] / first["memcpy_ms"] if first["memcpy_ms"] else 0.0,
            "snapshot ms": first["copy_ms"],
            "skipped": first["skipped"],
        }
    ]
    saves = [{"how": "holdfast, every step", "blocks ms": first["stall_ms"], "complete after ms": first["copy_ms"]}]
    saves += first["peers"]
    lost = restored[0]["steps_lost"]
    back = [{"how": "holdfast, from memory", "seconds": seconds, "GB/s": state / 1e9 / seconds, "steps lost": lost}]
    return {
        "A snapshot at every step": steps,
        "How long training stands still for one save": saves,
        "Back after a crash (processes are up)": back,
    }


def _clean(work: Path, memory: str) -> None:
    """Ends the keeper of the crashed run and frees its memory."""
    from holdfast.snapshot.keeper.status import kill_keeper
    from holdfast.snapshot.memory.run_memory import RunMemory

    run_memory = RunMemory.of("bench", work, memory)
    if run_memory.path.exists():
        kill_keeper(run_memory)
        with run_memory.locked():
            run_memory.free()
    shutil.rmtree(work, ignore_errors=True)
