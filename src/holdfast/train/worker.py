"""One rank: joins the process group, builds the training run, trains. The supervisor reads the error file of a failed rank."""

import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from holdfast.config import Config
from holdfast.parallel.layout import layout_of
from holdfast.parallel.mesh import build_grid, pick_device
from holdfast.system.cpu_features import avoid_amx_traps
from holdfast.system.errors import REFUSED, HoldfastError
from holdfast.system.progress import log
from holdfast.train.loop import TrainingRun
from holdfast.train.model_families import BatchFeed


class NoRestart(RuntimeError):
    """A user's mistake that only a rank can find: the supervisor does not restart."""


@record
def run_worker(config: Config) -> None:
    """Runs this process as the rank that RANK, WORLD_SIZE, MASTER_ADDR... describe; without them as the only rank."""
    try:
        _run(config)
    except HoldfastError as error:
        raise NoRestart(f"{REFUSED}{error}") from error


def _run(config: Config) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    device = pick_device()
    _set_up_torch(config, device)
    layout = layout_of(config.parallel, int(os.environ["WORLD_SIZE"]))
    join_ranks(device, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    grid = build_grid(layout, device)
    feed = BatchFeed(config, grid)
    log(f"training {config.model.model_type} on {layout.words()}")
    run = TrainingRun(config, grid, feed)
    finished = run.train()
    dist.barrier()
    log(f"finished after step {run.progress.step}" if finished else f"stopped on request at step {run.progress.step}")
    # Not after a failure: the other ranks would notice the lost connection and fail before the cause is reported.
    dist.destroy_process_group()


def _set_up_torch(config: Config, device: torch.device) -> None:
    """Warnings, determinism, threads and matrix precision."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cpu" and (config.train.bf16 or config.train.fp16):
        avoid_amx_traps()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
    torch.set_float32_matmul_precision("high")


def join_ranks(device: torch.device, timeout: timedelta) -> None:
    """Makes the process group. The supervisor's store survives a restart and still holds the addresses of dead ranks, so each
    attempt uses its own prefix."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
