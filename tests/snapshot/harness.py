"""Real ranks that train a tiny model with snapshots, a launcher that restarts them as torchelastic does, and faults to inject.

Ranks are forked from a server that has imported torch once, so that a world of two is up in a fraction of a second. Every rank
writes what it sees to `trace.jsonl` in the run folder: the hash of the whole state after `restore` and at the end.
"""

import ctypes
import hashlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.system.journal import BufferedJournal, read_journal

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "holdfast.snapshot.snapshots",
    ]
)
WAIT_SECONDS = 120.0


@dataclass
class Fault:
    """A fault of a rank: at `step`, at `point`, in the given attempts."""

    do: str
    rank: int = 0
    step: int = 5
    point: str = "stepped"  # forward | backward | stepped (before take) | taken | copying | restoring | saved
    attempts: tuple[int, ...] = (0,)


@dataclass
class Run:
    """One run of the tiny model: folders, length, layout and faults."""

    folder: Path
    memory: Path
    world: int = 2
    steps: int = 12
    layout: str = "ddp"
    faults: list[Fault] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 16
    slow_copy: dict[int, float] = field(default_factory=dict)
    save_every: int = 0
    pace: float = 0.0
    commit: bool = True
    nodes: int = 1
    name: str = "tiny"

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return [e for e in read_journal(self.folder / "events.jsonl") if name in (None, e["event"])]

    def trace(self, what: str) -> list[dict[str, Any]]:
        return [e for e in read_journal(self.folder / "trace.jsonl") if e["event"] == what]

    def memory_of(self, rank: int) -> Path:
        return self.memory / f"node{rank * self.nodes // self.world}" if self.nodes > 1 else self.memory


def model_of(run: Run) -> Any:
    import torch

    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(run.width, 4 * run.width),
        torch.nn.Dropout(0.1),
        torch.nn.ReLU(),
        torch.nn.Linear(4 * run.width, run.width),
    )


def build(run: Run) -> tuple[Any, Any]:
    import torch

    model = model_of(run)
    if run.layout == "ddp" and run.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif run.layout == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif run.layout == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (run.world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_hash(model: Any, optimizer: Any) -> str:
    """The whole state by global names, whatever the layout: equal states have equal hashes."""
    import torch

    from holdfast.checkpoint.state import State

    state = State(model, optimizer)
    digest = hashlib.sha256()
    tensors = {f"model.{name}": p.detach() for name, p in state.parameters.items()}
    for name, entry in state.optimizer_state():
        tensors |= {f"{name}.{key}": value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode() + whole.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(rank: int, attempt: int, run: Run, store: str) -> None:
    """What one rank runs."""
    import torch
    import torch.distributed as dist

    from holdfast.snapshot import Snapshots

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.world), TORCHELASTIC_RESTART_COUNT=str(attempt)
    )
    if run.world > 1 or run.layout != "ddp":
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{store}-{attempt}", run.world), rank=rank, world_size=run.world
        )
    trace = BufferedJournal(run.folder / "trace.jsonl")
    model, optimizer = build(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    seen: list[int] = []
    snapshots = Snapshots(
        run.name,
        model=model,
        optimizer=optimizer,
        extra={
            "scheduler": scheduler,
            "seen": (lambda: list(seen), lambda saved: seen.__setitem__(slice(None), saved)),
        },
        folder=run.folder,
        memory=run.memory_of(rank),
        **run.options,
    )
    if rank in run.slow_copy:
        slow_down(snapshots, run.slow_copy[rank])
    at = Injector(rank, attempt, run.faults, model, snapshots)
    at("restoring", 0)
    step = snapshots.restore()
    if not step:
        torch.manual_seed(100 + (rank % 2 if run.layout == "tp" else rank))
    trace.event("restored", rank=rank, attempt=attempt, step=step, hash=state_hash(model, optimizer), seen=list(seen))
    data = torch.Generator()
    while step < run.steps:
        data.manual_seed(step * 1000 + (0 if run.layout == "tp" else rank))
        at("forward", step)
        loss = model(torch.randn(4, run.width, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        at("backward", step)
        if run.commit:
            snapshots.commit()
        at("committed", step)
        optimizer.step()
        scheduler.step()
        step += 1
        seen.append(step)
        at("stepped", step)
        snapshots.take(step)
        at("taken", step)
        if run.save_every and step % run.save_every == 0:
            snapshots.save(step)
            at("saved", step)
        if step % 50 == 0:
            trace.event("resources", rank=rank, step=step, **resources())
        time.sleep(run.pace)
        if snapshots.stop_requested():
            break
    snapshots.commit()
    final = state_hash(model, optimizer)
    trace.event(
        "ended",
        rank=rank,
        attempt=attempt,
        step=step,
        hash=final,
        seen=list(seen),
        skipped=snapshots.skipped,
        pid=os.getpid(),
    )
    # The group is not destroyed: freed after it, DDP waits for gloo's thread with the interpreter's lock, which that may need.
    snapshots.close()


def resources() -> dict[str, int]:
    """Resources that must not grow from step to step."""
    import psutil

    me = psutil.Process()
    return {"descriptors": me.num_fds(), "threads": me.num_threads(), "private": me.memory_full_info().uss}


def run_as_script(*arguments: Any) -> None:
    """Behaves as a script: an exception goes through sys.excepthook and ends the process with 1."""
    try:
        train(*arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


def slow_down(snapshots: Any, seconds: float) -> None:
    """Makes this rank's copies take long: the slot is WRITING, with half of the payload new, for all that time."""
    from holdfast.snapshot.memory.copier import Copier

    original = Copier._copy_from_host

    def slow(self: Any, slot: Any, index: int) -> Any:
        time.sleep(seconds / len(self._on_host))
        return original(self, slot, index)

    Copier._copy_from_host = slow  # type: ignore[method-assign]


class Injector:
    """Injects a fault into its own process at the point where it is due."""

    def __init__(self, rank: int, attempt: int, faults: list[Fault], model: Any, snapshots: Any) -> None:
        self._faults = [f for f in faults if f.rank in (rank, -1) and attempt in f.attempts]
        self._model, self._snapshots = model, snapshots

    def __call__(self, point: str, step: int) -> None:
        for fault in self._faults:
            if fault.point == point and fault.step in (step, -1):
                self._do(fault.do)

    def _do(self, what: str) -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "kill while writing":
            wait_for(
                lambda: any(h.state == 1 for h in self._snapshots.allocator.arena.headers()), "a slot to be WRITING"
            )
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "segfault":
            ctypes.string_at(0)
        elif what == "abort":
            os.abort()
        elif what == "raise":
            raise RuntimeError("injected: the forward pass failed")
        elif what == "out of memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(64 << 30)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # another thread may receive the signal; this one would go on for a moment
        elif what == "hold the interpreter":
            re.match(r"(a|a)*b", "a" * 60)  # never ends, and never releases the interpreter lock
        elif what == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "usr1":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif what == "kill keeper":
            kill_keeper(self._snapshots.run_memory)
        elif what == "break the next copy":
            copier = self._snapshots.allocator.copier
            original = copier._copy

            def broken(copy: Any) -> None:
                copier._copy = original
                raise OSError("injected: the copy failed")

            copier._copy = broken
        elif what == "kill before ready":
            import holdfast.snapshot.memory.copier as copying

            copying.ready_header = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        elif what == "mutate":
            with __import__("torch").no_grad():
                next(iter(self._model.parameters())).add_(0)
        else:
            getattr(sys.modules[__name__], what)(self._snapshots)


def keeper_process(run_memory: Any) -> int:
    from holdfast.snapshot.memory.run_memory import keeper_alive, read_json

    wait_for(lambda: keeper_alive(run_memory) and read_json(run_memory.path / "keeper.json"), "a keeper")
    return int(read_json(run_memory.path / "keeper.json")["process"])


def kill_keeper(run_memory: Any) -> None:
    os.kill(keeper_process(run_memory), signal.SIGKILL)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)
    return found


@dataclass
class Launched:
    """The ranks of one attempt."""

    ranks: list[Any]

    def wait(self, run: Run) -> bool:
        """True when all ranks ended with 0; at the first failure the others are killed, as torchelastic does."""
        deadline = time.monotonic() + WAIT_SECONDS
        while any(rank.is_alive() for rank in self.ranks):
            if any(rank.exitcode not in (None, 0) for rank in self.ranks) or time.monotonic() > deadline:
                self.kill()
                break
            time.sleep(0.01)
        for rank in self.ranks:
            rank.join(WAIT_SECONDS)
        assert time.monotonic() < deadline, f"{run.folder}: the ranks did not end"
        return all(rank.exitcode == 0 for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.is_alive():
                with suppress(ProcessLookupError):  # it may end by itself at this moment
                    os.kill(rank.pid, signal.SIGCONT)
                rank.kill()


def launch(run: Run, attempt: int = 0) -> Launched:
    run.folder.mkdir(parents=True, exist_ok=True)
    for rank in range(run.world):
        run.memory_of(rank).mkdir(exist_ok=True)
    store = tempfile.mktemp(prefix="store-", dir=run.folder.parent)
    ranks = [
        context.Process(target=run_as_script, args=(rank, attempt, run, store), daemon=True)
        for rank in range(run.world)
    ]
    for rank in ranks:
        rank.start()
    return Launched(ranks)


def run_to_the_end(run: Run, restarts: int = 3, between: Callable[[int], None] | None = None) -> int:
    """Launches the run until all ranks end with 0; the number of restarts it took."""
    for attempt in range(restarts + 1):
        if launch(run, attempt).wait(run):
            return attempt
        if between is not None:
            between(attempt)
    raise AssertionError(f"the run failed {restarts + 1} times: {run.events()} {run.trace('restored')}")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory for one test; keepers that still run are killed, and the folder is removed."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    try:
        yield path
    finally:
        for run_memory in path.rglob("run.json"):
            from holdfast.snapshot.memory.run_memory import read_json

            keeper = read_json(run_memory.parent / "keeper.json")
            if keeper and b"holdfast.snapshot.keeper.service" in _command(keeper["process"]):
                os.kill(keeper["process"], signal.SIGKILL)
        shutil.rmtree(path, ignore_errors=True)


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def nothing_left(memory: Path) -> bool:
    """Whether memory holds no arena, status page or other file."""
    return not any(files for _, _, files in os.walk(memory))  # os.walk ignores a folder that is removed meanwhile


def abandon(snapshots: Any) -> None:
    """Leaves a run's memory as a kill of the process would, without ending it."""
    snapshots.allocator.close()
    snapshots._claim.release()


def report_nan_and_die(snapshots: Any) -> None:
    snapshots.report_nan()
    os.kill(os.getpid(), signal.SIGKILL)


def shorten_waits(snapshots: Any) -> None:
    """On this rank a keeper counts as hung after 3 s, and a save as failed after 3 s of failures."""
    from holdfast.snapshot.keeper import client as keeper_client
    from holdfast.snapshot.keeper import status as keeper_status

    keeper_status.HUNG_SECONDS = keeper_client.FAILED_SAVE_SECONDS = 3.0


def wait_for_disk(snapshots: Any) -> None:
    from holdfast.checkpoint.folder import checkpoints_in

    wait_for(lambda: checkpoints_in(snapshots.folder), "a checkpoint")


def remove_memory(snapshots: Any) -> None:
    shutil.rmtree(snapshots.run_memory.path.parent)


def stop_keeper(snapshots: Any) -> None:
    os.kill(keeper_process(snapshots.run_memory), signal.SIGSTOP)
