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

from holdfast.bench.harness import Row, Tables, refuse_unknown, show
from holdfast.config import SnapshotConfig
from holdfast.system.errors import HoldfastError

PEERS = ("torch.save", "dcp.save", "dcp.async_save")
SHAPES: dict[str, dict[str, int]] = {
    "small": {"layers": 4, "width": 256, "heads": 4, "positions": 128, "vocabulary": 8192},
    "345m": {"layers": 24, "width": 1024, "heads": 16, "positions": 1024, "vocabulary": 50304},
}
BATCHES = {"small": (4,), "345m": (36, 18)}


@dataclass(frozen=True, kw_only=True)
class SnapshotBench:
    """Measure the cost of a snapshot at every step, its blocking part, and the restore from memory.

    Examples:

      holdfast bench snapshot --model small
      holdfast bench snapshot --against torch.save --rounds 2 --json
      holdfast bench snapshot --batch-size 36 18 --restores 5 --against
    """

    against: tuple[str, ...] = PEERS
    """Peers in the same run."""
    model: Literal["auto", "small", "345m"] = "auto"
    """A GPT of 345 million parameters (auto, with CUDA) or of 5 million (auto, without)."""
    batch_size: tuple[int, ...] = ()
    """Sequences per step and rank, several in turn. Unset: 36 and 18 (345m; about 165 and 85 ms on an H200), 4 (small)."""
    steps: int = 20
    """Steps in a block."""
    rounds: int = 5
    """Blocks of each kind: without snapshots, with them, and on CUDA with parts of them left out."""
    restores: int = 1
    """Restores, each in processes of its own."""
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
    task: dict[str, Any] = {
        "number": 0,
        "shape": SHAPES[name],
        "cuda": cuda,
        "steps": options.steps,
        "rounds": options.rounds,
        "memory": options.snapshot_dir,
        "max_slowdown": SnapshotConfig().snapshot_max_slowdown,
        "work": str(work),
        "world": world,
    }
    task["batches"], task["against"] = options.batch_size or BATCHES[name], options.against
    try:
        trained = _children("train", task, world)[0]
        restored = [_children("restore", {**task, "number": number}, world) for number in range(options.restores)]
    finally:
        _clean(work, options.snapshot_dir)
    seconds = [max(answer["restore_s"] for answer in ranks) for ranks in restored]
    return {
        "A snapshot at every step": [_step_row(trained, step, name, world) for step in trained["steps"]],
        **_parts_table(trained["steps"]),
        "How long training stands still for one save": _saves(trained),
        "Back after a crash (processes are up)": [
            {
                "how": "holdfast, from memory",
                "seconds": one,
                "GB/s": trained["state_bytes"] / 1e9 / one,
                "steps lost": lost,
            }
            for one, lost in zip(seconds, (ranks[0]["steps_lost"] for ranks in restored), strict=True)
        ],
    }


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


def _step_row(trained: dict[str, Any], step: dict[str, Any], name: str, world: int) -> Row:
    return {
        "model": name,
        "parameters": trained["parameters"],
        "ranks": world,
        "batch": step["batch"],
        "state GB": trained["state_bytes"] / 1e9,
        "step ms": step["plain_ms"],
        "with snapshots ms": step["held_ms"],
        "ratio": step["ratios"]["all parts"],
        "blocking ms (median)": step["stall_ms"],
        "blocking ms (95%)": step["stall_p95_ms"],
        "host waits ms": step["wait_ms"],
        "copy of own share ms": trained["memcpy_ms"],
        "blocking/copy": step["stall_ms"] / trained["memcpy_ms"] if trained["memcpy_ms"] else 0.0,
        "snapshot ms": step["copy_ms"],
        "interval": step["interval"],
        "skipped": step["skipped"],
    }


def _parts_table(steps: list[dict[str, Any]]) -> Tables:
    """What a step costs with parts of its snapshot left out, in the same rounds; only where the parts can be separated."""
    rows = [
        {"batch": step["batch"], "snapshot": part, "ratio": ratio, "costs ms": (ratio - 1) * step["plain_ms"]}
        for step in steps
        for part, ratio in step["ratios"].items()
        if len(step["ratios"]) > 2 and part != "without snapshots"
    ]
    return {"What the parts of a snapshot cost": rows} if rows else {}


def _saves(trained: dict[str, Any]) -> list[Row]:
    last = trained["steps"][-1]
    own = {"how": "holdfast, every step", "blocks ms": last["stall_ms"], "complete after ms": last["copy_ms"]}
    return [own, *trained["peers"]]


def _clean(work: Path, memory: str) -> None:
    """Ends the keeper of the crashed run and frees its memory."""
    from holdfast.snapshot.keeper.status import discard
    from holdfast.snapshot.memory.run_memory import RunMemory

    discard(RunMemory.of("bench", work, memory))
    shutil.rmtree(work, ignore_errors=True)
