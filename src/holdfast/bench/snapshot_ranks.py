"""The ranks of `bench snapshot`: train with and without snapshots and crash; or restart and restore. JSON on the last line."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.bench.harness import median, run_rounds, timed
from holdfast.bench.plain_gpt import PlainGPT, PlainShape
from holdfast.snapshot import Snapshots


class TrainingLoop:
    """A plain GPT, AdamW and random tokens."""

    def __init__(self, task: dict[str, Any]) -> None:
        shape = dict(task["shape"])
        batch = shape.pop("batch")
        self.device = torch.device("cuda" if task["cuda"] else "cpu")
        self.step = 0
        torch.manual_seed(0)
        self.bare = PlainGPT(PlainShape(**shape)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-4, fused=task["cuda"])
        self.model: Any = self.bare
        if task["world"] > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.bare)
        if task["compile"]:
            self.model = torch.compile(self.bare)
        size = (batch, shape["positions"] + 1)
        tokens = torch.randint(shape["vocabulary"], size, device=self.device)
        self._inputs, self._labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def backward(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(self._inputs, self._labels)
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        """Waits until the device has trained; a copy on another stream may still run."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def open_snapshots(self, task: dict[str, Any]) -> Snapshots:
        return Snapshots(
            "bench",
            model=self.bare,
            optimizer=self.optimizer,
            folder=task["work"],
            memory=task["memory"],
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
    snapshots.restore()
    for _ in range(3):
        loop.backward()
        loop.update()
    turns: dict[str, Callable[[], StepBlock]] = {
        "plain": lambda: _plain_block(loop, task["steps"]),
        "held": lambda: _snapshot_block(loop, snapshots, task["steps"]),
    }
    blocks = run_rounds(turns, task["rounds"] + 1)
    plain, held = (
        blocks["plain"][1:],
        blocks["held"][1:],
    )  # the first: compilation, first touch and registration of memory
    blocked = _snapshot_block(loop, snapshots, task["steps"], device_first=True).stalls
    answer = {
        "parameters": sum(p.numel() for p in loop.bare.parameters()),
        "state_bytes": sum(item.box.nbytes for item in snapshots.state.items()),
        "plain_ms": 1e3 * median(plain, lambda block: block.seconds),
        "held_ms": 1e3 * median(held, lambda block: block.seconds),
        "stall_ms": 1e3 * statistics.median(blocked),
        "stall_p95_ms": 1e3 * sorted(blocked)[int(0.95 * (len(blocked) - 1))],
        "wait_ms": 1e3 * statistics.median(stall for block in held for stall in block.stalls),
        "copy_ms": 1e3 * statistics.median(copy for block in held for copy in block.copies),
        "memcpy_ms": 0.0 if task["cuda"] else _memory_copy(snapshots),
        "skipped": snapshots.skipped,
        "peers": [_peer(name, loop, task, rank) for name in task["against"]],
    }
    snapshots.commit()
    return answer


def _plain_block(loop: TrainingLoop, steps: int) -> StepBlock:
    begin = 0.0
    for number in range(-1, steps):
        if number == 0:  # one step before the measured ones, as with snapshots: an idle device runs faster for a moment
            loop.wait()
            begin = time.perf_counter()
        loop.backward()
        loop.update()
    loop.wait()
    return StepBlock((time.perf_counter() - begin) / steps)


def _snapshot_block(loop: TrainingLoop, snapshots: Snapshots, steps: int, device_first: bool = False) -> StepBlock:
    """Steps with snapshots. With `device_first` the device finishes the backward pass before `commit`, whose wait is then
    caused by the snapshot alone. Without it the host runs ahead of the device, and waits in `commit` instead of elsewhere.
    """
    begin, block = 0.0, StepBlock()
    for number in range(-1, steps):
        if number == 0:
            # a copy runs during the first measured step too; the one of the last step ends after the measured time
            loop.wait()
            begin = time.perf_counter()
        loop.backward()
        if device_first:
            loop.wait()
        snapshots.commit()
        if number >= 0:
            block.stalls.append(snapshots.stall_seconds)
            block.copies.append(snapshots.copy_seconds)
        loop.update()
        loop.step += 1
        snapshots.take(loop.step)
    loop.wait()
    block.seconds = (time.perf_counter() - begin) / steps
    snapshots.commit()
    return block


def _memory_copy(snapshots: Snapshots) -> float:
    """Milliseconds of the plain copy of this rank's own share, between warm memory."""
    share = sum(item.box.nbytes for item in snapshots.state.items()) // snapshots.rank_group.world
    source, target = np.ones(share, dtype=np.uint8), np.ones(share, dtype=np.uint8)
    return 1e3 * statistics.median(timed(lambda: np.copyto(target, source)) for _ in range(15))


def _peer(name: str, loop: TrainingLoop, task: dict[str, Any], rank: int) -> dict[str, Any]:
    """How long one save of the same state blocks, and when it is complete; the median of three."""
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    state = {"model": loop.bare.state_dict(), "optimizer": loop.optimizer.state_dict()}
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
    loop = TrainingLoop({**task, "compile": False})
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=True)
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
        backend, init_method=f"file://{task['work']}/store-{what}", rank=rank, world_size=task["world"]
    )
    answer = train(task, rank) if what == "train" else restore(task, rank)
    print(json.dumps(answer), flush=True)
    dist.barrier()
    # no close(): the restore recovers from this crash
    os._exit(0)


if __name__ == "__main__":
    main()
