"""The processes of a scenario: ranks that train, and their keepers.

Ranks are forked from a process that has imported torch, keepers from ranks: a start of the interpreter would cost more than
everything else. Where the scenario asks for it the keeper is a new interpreter, as in production. The limits of waits are
shortened; the rules are not.
"""

import faulthandler
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.system.errors import HoldfastError
from tests.snapshot.harness import Run, build, state_hash
from tests.snapshot.injection.layer import Layer, install, note, note_keeper

SAVE_EVERY, KILLED_AFTER = 2, 3
COPY_LIMIT, FORK_LIMIT = 20.0, 10.0
SHORTER = {
    "snapshots": {"CLOSE_SECONDS": 20.0},
    "keeper.client": {
        "CHECK_SECONDS": 0.2,
        "LONGEST_CHECK_SECONDS": 0.5,
        "STABLE_SECONDS": 2.0,
        "FAILED_SAVE_SECONDS": 8.0,
    },
    "keeper.service": {
        "ROUND_SECONDS": 0.02,
        "FAILED_ROUND_SECONDS": 0.2,
        "VERIFY_SECONDS": 0.2,
        "LISTEN_SECONDS": 0.2,
    },
    "keeper.save_queue": {
        "RETRY_SECONDS": 0.2,
        "COPY_SECONDS": 5.0,
        "AGREEMENT_SECONDS": 2.0,
        "PEER_WRITE_SECONDS": 2.0,
    },
}


@dataclass(frozen=True)
class Start:
    """One start of all ranks of a run."""

    number: int
    run: Run
    folder: Path
    layer: Layer
    interpreter: bool
    """keepers are new interpreters"""
    die_after: int | None

    def note(self, what: str, *fields: object) -> None:
        note(self.folder / "trace", what, *fields)

    def fork(self, rank: int) -> int:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            _run_rank(self, rank)
        return process

    def node_of(self, rank: int) -> int:
        return rank * self.run.nodes // self.run.world


def _run_rank(start: Start, rank: int) -> None:
    """A rank's process, to its end."""
    log = os.open(start.folder / f"rank-{rank}-{start.number}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log, all_threads=True)  # for SIGABRT, too
    os.environ["HOLDFAST_LEASE_SECONDS"] = "3"
    status = 0
    try:
        shorten_waits()
        start.layer.become(f"trainer-{rank}")
        install(start.layer)
        role = f"keeper-{start.node_of(rank)}"
        if start.interpreter:
            os.environ.update(start.layer.environment(role))
        else:
            client = importlib.import_module("holdfast.snapshot.keeper.client")
            client.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
                run=lambda command, **named: _fork_keeper(start, role, command[-1], named),
                DEVNULL=None,
                PIPE=None,
                TimeoutExpired=subprocess.TimeoutExpired,
            )
        _train(start, rank)
    except HoldfastError as error:
        start.note("error", start.number, rank, "HoldfastError", error)
        status = 1
    except BaseException as error:
        traceback.print_exc()
        text = f"{error} {''.join(traceback.format_exception(error)[-3:])}"
        start.note("error", start.number, rank, type(error).__name__, text)
        status = 3
    os._exit(status)


def shorten_waits() -> None:
    for name, values in SHORTER.items():
        module = importlib.import_module(f"holdfast.snapshot.{name}")
        for constant, value in values.items():
            assert hasattr(module, constant), f"{module.__name__} has no {constant}"
            setattr(module, constant, value)


def _train(start: Start, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from holdfast.snapshot import Snapshots

    run = start.run
    torch.set_num_threads(1)
    if run.world > 1:
        store = dist.FileStore(str(start.folder / f"store-{start.number}"), run.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world)
    model, optimizer = build(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    extra, memory = {"scheduler": scheduler}, run.memory_of(rank)
    snapshots = Snapshots(run.name, model, optimizer, extra, run.folder, memory=memory, **run.options)
    step = snapshots.restore()
    if not step:
        torch.manual_seed(100 + rank)
    start.note("restored", start.number, rank, step, state_hash(model, optimizer))
    data = torch.Generator()
    while step < run.steps:
        data.manual_seed(step * 1000 + rank)
        loss = model(torch.randn(4, run.width, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        snapshots.commit()
        start.note("held", start.number, rank, max(0, snapshots._ready))
        if step == KILLED_AFTER and run.nodes > 1:
            _wait_for_copy(start, rank, snapshots)
        if step == start.die_after:
            if run.world > 1:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        step += 1
        snapshots.take(step)
        if step % SAVE_EVERY == 0:
            snapshots.save(step)
    snapshots.close()


def _wait_for_copy(start: Start, rank: int, snapshots: Any) -> None:
    """Waits until every node's memory is copied to its peer; that it never is, once the ranks have chosen a step, is noted.

    All ranks wait together: one that went on would wait for the others in a collective, and not replace its keeper."""
    import torch
    import torch.distributed as dist

    deadline = time.monotonic() + COPY_LIMIT
    chosen = snapshots.allocator._shipping
    while True:
        copied, late = chosen is None or snapshots.page["shipped"] > 0, time.monotonic() > deadline
        everywhere = torch.tensor([int(copied), -int(late)])
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere[0] or everywhere[1]:
            break
        snapshots._saves.check_keeper()
        time.sleep(0.01)
    start.note("copied" if copied else "not copied", start.number, rank, snapshots.page["shipped"])


def _fork_keeper(start: Start, role: str, path: str, named: dict[str, Any]) -> Any:
    """In place of a new interpreter: a process without parent, of its own session, forked from the rank.

    The rank has threads. A lock that one of them holds at the fork stays locked in the forked process, which may then hang: it is
    killed, and another one forked."""
    while True:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.setsid()
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            _keep(start, role, path, named["env"])
        os.close(writing)
        answered, _, _ = select.select([reading], [], [], FORK_LIMIT)
        if not answered:
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        started = os.read(reading, 100) if answered else b""
        os.close(reading)
        if answered:
            return SimpleNamespace(stdout=started)


def _keep(start: Start, role: str, path: str, environment: dict[str, str]) -> None:
    from holdfast.snapshot.keeper import service

    status = 1
    try:
        os.closerange(3, 512)
        log = os.open(start.folder / f"{role}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.unregister(signal.SIGUSR2)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        note_keeper(start.folder, role)
        start.layer.become(role)
        service.main(path)
        status = 0
    except SystemExit as error:
        print(error, file=sys.stderr, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    os._exit(status)
