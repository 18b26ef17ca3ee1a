"""The ranks of `bench snapshot`: train with and without snapshots and crash; or come back and restore. JSON on the last line."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.bench.plain_gpt import PlainGPT, PlainShape
from holdfast.snapshot import Snapshots


class Training:
    """A plain GPT, AdamW and random tokens: one call is one step."""

    def __init__(self, task: dict[str, Any]) -> None:
        shape = dict(task["shape"])
        batch = shape.pop("batch")
        self.device = torch.device("cuda" if task["cuda"] else "cpu")
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

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        """Until the device has trained; a copy on another stream may still be on its way."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def train(task: dict[str, Any], rank: int) -> dict[str, Any]:
    training = Training(task)
    snapshots = Snapshots(
        "bench",
        model=training.bare,
        optimizer=training.optimizer,
        folder=task["work"],
        memory=task["memory"],
        listen_to_signals=False,
    )
    step = snapshots.restore()
    for _ in range(3):
        training.backward()
        training.step()
    plain: list[float] = []
    held: list[float] = []
    stalls: list[float] = []
    copies: list[float] = []
    blocked: list[float] = []
    for round_ in range(task["rounds"] + 1):
        blocks: list[Callable[[], int]] = [
            lambda: _plain_block(training, task["steps"], plain),
            lambda at=step: _held_block(training, snapshots, at, task["steps"], held, stalls, copies),  # type: ignore[misc]
        ]
        for block in blocks:
            step = block() or step
        if round_ == 0:  # compilation, first touch and registration of the memory
            for values in (plain, held, stalls, copies):
                values.clear()
    step = _held_block(training, snapshots, step, task["steps"], [], blocked, [], settle=True)
    answer = {
        "parameters": sum(p.numel() for p in training.bare.parameters()),
        "state_bytes": sum(item.box.nbytes for item in snapshots.state.items()),
        "plain_ms": 1e3 * statistics.median(plain),
        "held_ms": 1e3 * statistics.median(held),
        "stall_ms": 1e3 * statistics.median(blocked),
        "stall_p95_ms": 1e3 * sorted(blocked)[int(0.95 * (len(blocked) - 1))],
        "wait_ms": 1e3 * statistics.median(stalls),
        "copy_ms": 1e3 * statistics.median(copies),
        "memcpy_ms": 0.0 if task["cuda"] else _memory_copy(snapshots),
        "skipped": snapshots.skipped,
        "rivals": [row for name in task["against"] for row in _rival(name, training, task, rank)],
    }
    snapshots.commit()
    return answer


def _plain_block(training: Training, steps: int, times: list[float]) -> int:
    # One step outside of the measured time, here as with snapshots: a device that has rested runs faster for a moment.
    training.backward()
    training.step()
    training.wait()
    begin = time.perf_counter()
    for _ in range(steps):
        training.backward()
        training.step()
    training.wait()
    times.append((time.perf_counter() - begin) / steps)
    return 0


def _held_block(
    training: Training,
    snapshots: Snapshots,
    step: int,
    steps: int,
    times: list[float],
    stalls: list[float],
    copies: list[float],
    settle: bool = False,
) -> int:
    """Steps with snapshots. `settle` lets the device finish the backward pass first: what `commit` then waits for, nobody
    else would have waited for. Without it the host runs ahead of the device, and waits in `commit` instead of elsewhere.
    """
    begin = 0.0
    for number in range(-1, steps):
        if number == 0:
            # a copy is on its way in the first measured step too; the one of the last step ends outside of the measured time
            training.wait()
            begin = time.perf_counter()
        training.backward()
        if settle:
            training.wait()
        snapshots.commit()
        if number >= 0:
            stalls.append(snapshots.stall_seconds)
            copies.append(snapshots.copy_seconds)
        training.step()
        step += 1
        snapshots.take(step)
    training.wait()
    times.append((time.perf_counter() - begin) / steps)
    snapshots.commit()
    return step


def _memory_copy(snapshots: Snapshots) -> float:
    """Milliseconds of the plain copy of this rank's own share, between warm memory."""
    share = sum(item.box.nbytes for item in snapshots.state.items()) // snapshots.rank_group.world
    source, target = np.ones(share, dtype=np.uint8), np.ones(share, dtype=np.uint8)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def _rival(name: str, training: Training, task: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """How long one save of the same state blocks, and when it is complete; the median of three."""
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    state = {"model": training.bare.state_dict(), "optimizer": training.optimizer.state_dict()}
    blocked, complete = [], []
    for attempt in range(3):
        folder = Path(task["work"]) / "rivals" / f"{name}-{attempt}"
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        training.wait()
        begin = time.perf_counter()
        if name == "torch.save":
            if rank == 0:
                torch.save(state, folder / "state.pt")
            blocked.append(time.perf_counter() - begin)
        elif name == "dcp.save":
            dcp_save(state, checkpoint_id=folder)
            blocked.append(time.perf_counter() - begin)
        else:
            future: Any = async_save(state, checkpoint_id=folder)
            blocked.append(time.perf_counter() - begin)
            future.result()
        complete.append(time.perf_counter() - begin)
        dist.barrier()
    return [
        {
            "how": name,
            "blocks ms": 1e3 * statistics.median(blocked),
            "complete after ms": 1e3 * statistics.median(complete),
        }
    ]


def restore(task: dict[str, Any], rank: int) -> dict[str, Any]:
    """A fresh process whose model and device are ready: the time of `restore` alone."""
    training = Training({**task, "compile": False})
    training.backward()
    training.optimizer.zero_grad(set_to_none=True)
    snapshots = Snapshots(
        "bench",
        model=training.bare,
        optimizer=training.optimizer,
        folder=task["work"],
        memory=task["memory"],
        listen_to_signals=False,
    )
    training.wait()
    begin = time.perf_counter()
    step = snapshots.restore()
    training.wait()
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
    # no close(): this is the crash that the restore comes back from
    os._exit(0)


if __name__ == "__main__":
    main()
