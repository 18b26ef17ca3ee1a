"""The ranks of `bench snapshot`: train with and without snapshots and crash; or restart and restore. JSON on the last line."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.bench.contenders import HoldfastContender, chosen_config, random_batch
from holdfast.bench.harness import median, median_ratio, run_rounds, timed
from holdfast.parallel.layout import layout_of
from holdfast.parallel.mesh import build_grid
from holdfast.snapshot import Snapshots
from holdfast.snapshot.memory.device_copy import CudaLane, recorded

WHOLE, PLAIN = "all parts", "without snapshots"
PARTS = {"without row sums": {"sums": False}, "without the copy": {"copies": False}}
PARTS["bookkeeping alone"] = {"sums": False, "copies": False}


class PartialLane(CudaLane):
    """Leaves parts of the copy out, to measure them. What the slots hold then does not verify."""

    def __init__(self, device: torch.device, sums: bool = True, copies: bool = True) -> None:
        super().__init__(device)
        self._sums, self._copies = sums, copies

    def sum(self, row_sums: Any, sums: torch.Tensor, digest: torch.Tensor) -> Any:
        return super().sum(row_sums, sums, digest) if self._sums else recorded(self.summing)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        return super().copy(targets, sources) if self._copies else recorded(self.copying)


class TrainingLoop:
    """The functions of `holdfast train`, in the order of its loop, on random tokens."""

    def __init__(self, task: dict[str, Any]) -> None:
        cuda, shape = task["cuda"], task["shape"]
        self.device = torch.device("cuda:0" if cuda else "cpu")
        self.step = 0
        torch.manual_seed(0)
        config = chosen_config(None, cuda, shape["positions"])
        model = replace(
            config.model, num_layers=shape["layers"], hidden_size=shape["width"], vocab_size=shape["vocabulary"]
        )
        model = replace(model, num_attention_heads=shape["heads"], hidden_dropout=0.0, attention_dropout=0.0)
        self._config = replace(config, model=model)
        grid = build_grid(layout_of(config.parallel, task["world"]), self.device)
        self._contender = HoldfastContender(self._config, grid)
        self.models, self.optimizer = self._contender.stages, self._contender.optimizer

    def set_batch(self, size: int) -> None:
        train = replace(self._config.train, micro_batch_size=size)
        self._batch = random_batch(replace(self._config, train=train), self.device, seed=0)

    def train_step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self._contender.step(self._batch, lambda phase: None, before_update)
        self.step += 1

    def wait(self) -> None:
        """Waits until the device has trained; a copy on another stream may still run."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def open_snapshots(self, task: dict[str, Any]) -> Snapshots:
        return Snapshots(
            "bench",
            self.models,
            self.optimizer,
            folder=task["work"],
            memory=task["memory"],
            max_slowdown=task["max_slowdown"],
            listen_to_signals=False,
        )


@dataclass
class StepBlock:
    """Consecutive steps: seconds per step; with snapshots also the stall and the copy of each, in seconds."""

    seconds: float = 0.0
    stalls: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)


def train(task: dict[str, Any], rank: int) -> dict[str, Any]:
    loop = TrainingLoop(task)
    snapshots = loop.open_snapshots(task)
    loop.step = snapshots.restore()
    return {
        "steps": [_measure(loop, snapshots, task, batch) for batch in task["batches"]],
        "parameters": sum(p.numel() for model in loop.models for p in model.parameters()),
        "state_bytes": sum(item.box.nbytes for item in snapshots.state.items()),
        "memcpy_ms": 0.0 if task["cuda"] else _memory_copy(snapshots),
        "peers": [_peer(name, loop, task, rank) for name in task["against"]],
    }


def _measure(loop: TrainingLoop, snapshots: Snapshots, task: dict[str, Any], batch: int) -> dict[str, Any]:
    """Blocks of steps without snapshots, with them, and on CUDA with parts of them left out, in turns."""
    loop.set_batch(batch)
    for _ in range(4):
        loop.train_step()
    _snapshot_block(loop, snapshots, 2)  # first touch and registration of memory
    turns: dict[str, Callable[[], StepBlock]] = {
        PLAIN: lambda: _plain_block(loop, task["steps"]),
        WHOLE: lambda: _snapshot_block(loop, snapshots, task["steps"]),
    }
    if task["cuda"]:
        turns |= {name: _partial_turn(loop, snapshots, task["steps"], **parts) for name, parts in PARTS.items()}
    blocks = run_rounds(turns, task["rounds"])
    plain, held = blocks[PLAIN], blocks[WHOLE]
    blocked = _snapshot_block(loop, snapshots, task["steps"], device_first=True).stalls
    return {
        "batch": batch,
        "plain_ms": 1e3 * median(plain, lambda block: block.seconds),
        "held_ms": 1e3 * median(held, lambda block: block.seconds),
        "ratios": {name: median_ratio(found, plain, lambda block: block.seconds) for name, found in blocks.items()},
        "stall_ms": 1e3 * statistics.median(blocked),
        "stall_p95_ms": 1e3 * sorted(blocked)[int(0.95 * (len(blocked) - 1))],
        "wait_ms": 1e3 * statistics.median(stall for block in held for stall in block.stalls),
        "copy_ms": 1e3 * statistics.median(copy for block in held for copy in block.copies),
        "interval": snapshots.interval.steps,
        "skipped": snapshots.skipped,
    }


def _plain_block(loop: TrainingLoop, steps: int) -> StepBlock:
    begin = 0.0
    for number in range(-1, steps):
        if number == 0:  # one step before the measured ones, as with snapshots: an idle device runs faster for a moment
            loop.wait()
            begin = time.perf_counter()
        loop.train_step()
    loop.wait()
    return StepBlock((time.perf_counter() - begin) / steps)


def _snapshot_block(loop: TrainingLoop, snapshots: Snapshots, steps: int, device_first: bool = False) -> StepBlock:
    """Steps with snapshots. With `device_first` the device finishes the backward pass before `commit`, whose wait is then
    caused by the snapshot alone. Without it `commit` waits where the host would otherwise wait for the device.
    """
    begin, block = 0.0, StepBlock()

    def commit() -> None:
        if device_first:
            loop.wait()
        snapshots.commit()
        block.stalls.append(snapshots.stall_seconds)
        block.copies.append(snapshots.copy_seconds)

    for number in range(-1, steps):
        if number == 0:
            # a copy runs during the first measured step too; the one of the last step ends after the measured time
            loop.wait()
            begin, block = time.perf_counter(), StepBlock()
        loop.train_step(commit)
        snapshots.take(loop.step)
    loop.wait()
    block.seconds = (time.perf_counter() - begin) / steps
    snapshots.finish_copy()
    return block


def _partial_turn(loop: TrainingLoop, snapshots: Snapshots, steps: int, **parts: bool) -> Callable[[], StepBlock]:
    """Steps whose snapshots lack some parts."""

    def turn() -> StepBlock:
        copier = snapshots.allocator.copier
        assert copier is not None and copier.device_copy is not None
        whole, copier.device_copy.lane = copier.device_copy.lane, PartialLane(loop.device, **parts)
        try:
            return _snapshot_block(loop, snapshots, steps)
        finally:
            copier.device_copy.lane = whole

    return turn


def _memory_copy(snapshots: Snapshots) -> float:
    """Milliseconds of the plain copy of this rank's own share, between warm memory."""
    share = sum(item.box.nbytes for item in snapshots.state.items()) // snapshots.rank_group.world
    source, target = np.ones(share, dtype=np.uint8), np.ones(share, dtype=np.uint8)
    return 1e3 * statistics.median(timed(lambda: np.copyto(target, source)) for _ in range(15))


def _peer(name: str, loop: TrainingLoop, task: dict[str, Any], rank: int) -> dict[str, Any]:
    """How long one save of the same state blocks, and when it is complete; the median of three."""
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    (model,) = loop.models
    state = {"model": model.state_dict(), "optimizer": loop.optimizer.state_dict()}
    blocked, complete = [], []
    for attempt in range(3):
        folder = Path(task["work"]) / "peers" / f"{name}-{attempt}"
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        loop.wait()
        begin, future = time.perf_counter(), None
        if name == "dcp.async_save":
            future = async_save(state, checkpoint_id=folder)
        elif name == "dcp.save":
            dcp_save(state, checkpoint_id=folder)
        elif rank == 0:
            torch.save(state, folder / "state.pt")
        blocked.append(time.perf_counter() - begin)
        if future is not None:
            future.result()  # type: ignore[union-attr]
        complete.append(time.perf_counter() - begin)
        dist.barrier()
    blocks, after = 1e3 * statistics.median(blocked), 1e3 * statistics.median(complete)
    return {"how": name, "blocks ms": blocks, "complete after ms": after}


def restore(task: dict[str, Any], rank: int) -> dict[str, Any]:
    """A fresh process whose model and device are ready: the time of `restore` alone."""
    loop = TrainingLoop(task)
    torch.zeros(1, device=loop.device)
    snapshots = loop.open_snapshots(task)
    loop.wait()
    begin = time.perf_counter()
    step = snapshots.restore()
    loop.wait()
    seconds = time.perf_counter() - begin
    return {"restore_s": seconds, "step": step, "steps_lost": max(0, snapshots.reached - step)}


def main() -> None:
    what, task, rank = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    if not task["cuda"]:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if task["cuda"] else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{task['work']}/store-{what}-{task['number']}", rank=rank, world_size=task["world"]
    )
    answer = train(task, rank) if what == "train" else restore(task, rank)
    print(json.dumps(answer), flush=True)
    dist.barrier()
    # no close(): the restore recovers from this crash
    os._exit(0)


if __name__ == "__main__":
    main()
