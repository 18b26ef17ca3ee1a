"""One rank: joins the process group, builds the training run, trains. The supervisor reads the error file of a failed rank."""

import gc
import os
import warnings
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from holdfast.config import Config, ParallelConfig
from holdfast.parallel.layout import layout_of
from holdfast.parallel.mesh import build_grid, pick_device
from holdfast.system.cpu_features import avoid_amx_traps
from holdfast.system.errors import REFUSED, HoldfastError
from holdfast.system.progress import log
from holdfast.train.checks.estimate import activation_bytes, parameters_per_rank
from holdfast.train.flight_records import write_record
from holdfast.train.learning_rates import check_rates
from holdfast.train.loop import TrainingRun
from holdfast.train.model_families import BatchFeed, parameter_names
from holdfast.train.schedule import batches_of
from holdfast.train.timeline import StartTimeline

BYTES_PER_PARAMETER = 18
"""Weight, gradient, two moments in fp32, and the copy of the weight that the products read."""


class NoRestart(RuntimeError):
    """A user's mistake that only a rank can find: the supervisor does not restart."""


@record
def run_worker(config: Config, timeline: StartTimeline | None = None) -> None:
    """Runs this process as the rank that RANK, WORLD_SIZE, MASTER_ADDR... describe; without them as the only rank."""
    try:
        _run(config, timeline or StartTimeline())
    except HoldfastError as error:
        raise NoRestart(f"{REFUSED}{error}") from error
    except RuntimeError as error:
        if "timed out" in str(error).lower() and not torch.cuda.is_available():  # NCCL's watchdog writes its own
            rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
            write_record(rank, range(rank - local, rank - local + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        raise


def _run(config: Config, timeline: StartTimeline) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    device = pick_device()
    _set_up_torch(config, device)
    timeline.mark("device")
    layout = layout_of(config.parallel, int(os.environ["WORLD_SIZE"]))
    join_ranks(device, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    grid = build_grid(layout, device)
    if config.optimizer.lr_mult:
        check_rates(config.optimizer, parameter_names(config))
    timeline.mark("join ranks")
    feed = BatchFeed(config, grid)
    timeline.mark("data")
    log(f"training {config.model.model_type} on {layout.words()}")
    run = TrainingRun(config, grid, feed, timeline)
    finished = run.train()
    dist.barrier()
    log(f"finished after step {run.progress.step}" if finished else f"stopped on request at step {run.progress.step}")
    # Not after a failure: the other ranks would notice the lost connection and fail before the cause is reported.
    dist.destroy_process_group()


def rehearse(config: Config) -> None:
    """Runs one step of a model with one layer and one micro batch, alone, if the device has memory for it. Keeps nothing of it.

    The products, kernels and collectives are those of the rank: loading them is what makes a first step slow.
    """
    device = pick_device()
    _set_up_torch(config, device)
    small = _rehearsed(config)
    layout, cuda = layout_of(small.parallel, 1), device.type == "cuda"
    needed = sum(parameters_per_rank(small, layout)) * BYTES_PER_PARAMETER + activation_bytes(small, layout)
    if cuda and 2 * needed > (free := torch.cuda.mem_get_info(device)[0]):
        log(f"no rehearsal: it needs {needed:,} bytes and twice as many free ones, and {free:,} are free")
        return
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with torch.random.fork_rng([device] if cuda else []):
            grid = build_grid(layout, device)
            TrainingRun(small, grid, BatchFeed(small, grid), StartTimeline()).rehearse()
    finally:
        dist.destroy_process_group()
        gc.collect()
        if cuda:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _rehearsed(config: Config) -> Config:
    """The run with one layer and one micro batch, on one rank, over the samples of the run: another number of them would have an
    index of its own."""
    batches = batches_of(config, layout_of(config.parallel).data)
    train = replace(
        config.train,
        train_iters=None,
        train_samples=batches.samples(batches.iterations(config.train.train_iters)),
        global_batch_size=config.train.micro_batch_size,
        rampup_batch_size=(),
        eval_interval=0,
        save=None,
        load=None,
    )
    return replace(
        config,
        model=replace(config.model, num_layers=1),
        data=replace(config.data, num_workers=0),
        train=train,
        optimizer=replace(
            config.optimizer, lr_decay_style="constant", lr_decay_iters=None, lr_warmup_iters=0, lr_warmup_fraction=None
        ),
        parallel=ParallelConfig(),
    )


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
        _backend(device),
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
