"""One rank: joins the others, builds its part, trains. What went wrong is written where the supervisor finds it."""

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
from holdfast.train.loop import Outcome, log_start, run_rank
from holdfast.train.model_families import BatchFeed


class Refused(RuntimeError):
    """A user's mistake that only a rank could find; restarting would not help."""


@record
def run_worker(config: Config) -> Outcome:
    """Runs this process as the rank that the environment says (RANK, WORLD_SIZE, MASTER_ADDR...; alone without them)."""
    try:
        return _run(config)
    except HoldfastError as error:
        raise Refused(f"{REFUSED}{error}") from error


def join_ranks(device: torch.device, timeout: timedelta) -> None:
    """Makes the process group. The supervisor's store outlives a restart, and with it the addresses of dead ranks: each attempt
    gets names of its own, or a rank that starts quickly would call a process that is no more."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )


def _run(config: Config) -> Outcome:
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = pick_device()
    if device.type == "cpu" and (config.train.bf16 or config.train.fp16):
        avoid_amx_traps()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
    torch.set_float32_matmul_precision("high")
    layout = layout_of(config.parallel, int(os.environ["WORLD_SIZE"]))
    join_ranks(device, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    grid = build_grid(layout, device)
    feed = BatchFeed(config, grid)
    log_start(config, layout)
    outcome = run_rank(config, grid, feed)
    dist.barrier()
    log(f"finished after step {outcome.step}" if outcome.finished else f"stopped on request at step {outcome.step}")
    # Not after a failure: the others must not notice, and fail themselves, before the cause has been told.
    dist.destroy_process_group()
    return outcome
