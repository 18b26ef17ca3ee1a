"""`bench train`: whole training steps on random tokens, beside a plain compiled GPT-2 and Hugging Face's model.

The first step, which compiles, has a column of its own and counts in no other.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.bench.harness import Row, Tables, installed, median, refuse_unknown, run_rounds, show
from holdfast.config import Config
from holdfast.system.errors import UsageError
from holdfast.system.progress import log

if TYPE_CHECKING:
    from holdfast.bench.contenders import Contender

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Measure training steps on random tokens: tokens/s, MFU, time per phase, and peak memory.

    Examples:

      holdfast bench train
      holdfast bench train --config gpt2_345m --batch-size 32 --steps 40
      holdfast bench train --against nanogpt --fp8 --profile
      holdfast bench train --against --json
    """

    config: Path | None = None
    """Configuration whose model and precision are measured. Unset: GPT-2 345M in bf16 on CUDA, a tiny GPT on the CPU."""
    against: tuple[str, ...] = ("nanogpt", "hf")
    """Peers in the same run: nanogpt (a plain compiled GPT-2, for GPT), hf (transformers, if installed)."""
    steps: int = 20
    """Measured steps of each contender."""
    rounds: int = 4
    """The steps are measured in this many turns."""
    batch_size: int | None = None
    """Sequences per step, computed at once. Unset: the configuration's micro_batch_size."""
    seq_length: int | None = None
    """Tokens per sequence. Unset: the configuration's."""
    fp8: bool = False
    """Measure holdfast with --fp8."""
    profile: bool = False
    """Also show where holdfast's step goes by kind of kernel, and how far each kind is from its bound. CUDA only."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: TrainBench) -> None:
    show("train", run(options), options.json)


def run(options: TrainBench) -> Tables:
    import torch
    import torch.distributed as dist

    from holdfast.bench.contenders import PEERS
    from holdfast.parallel.mesh import pick_device
    from holdfast.system.cpu_features import avoid_amx_traps

    refuse_unknown(options.against, PEERS)
    device, world = pick_device(), int(os.environ.get("WORLD_SIZE", "1"))
    if options.profile and device.type != "cuda":
        raise UsageError(
            "--profile needs a CUDA device; without it, the table of phases shows where a step's time goes"
        )
    config = _prepare(options, device.type == "cuda", world)
    if device.type == "cpu" and (config.train.bf16 or config.train.fp16):
        avoid_amx_traps()
    torch.set_float32_matmul_precision("high")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        results = _measure(config, device, options, world)
        profiled = _profile(config, device, results) if options.profile else {}
    finally:
        dist.destroy_process_group()
    return {**_tables(config, device, results, world), **profiled}


def _prepare(options: TrainBench, cuda: bool, world: int) -> Config:
    """The configuration to measure: complete, one device's worth, nothing read from files."""
    from holdfast.bench.contenders import chosen_config

    config, length = chosen_config(options.config, cuda, 1024 if cuda else 256), options.seq_length
    size = options.batch_size or config.train.micro_batch_size
    vocabulary = config.model.vocab_size or 50257
    model = replace(config.model, vocab_size=vocabulary, hidden_dropout=0.0, attention_dropout=0.0)
    if length is not None and (config.model.max_position_embeddings or length) < length:
        model = replace(model, max_position_embeddings=length)
    data = replace(config.data, seq_length=length or config.data.seq_length)
    train = replace(config.train, micro_batch_size=size, global_batch_size=size * world, rampup_batch_size=())
    train = replace(train, fp8=options.fp8 or train.fp8)
    # one optimizer for all contenders: fused AdamW
    return replace(config, model=model, data=data, train=train, optimizer=replace(config.optimizer, optimizer="adam"))


@dataclass
class StepCost:
    """What a step of one turn cost. Times are seconds per step, `phases` milliseconds, `peak` bytes."""

    wall: float
    cpu: float
    phases: dict[str, float]
    peak: int
    loss: float


@dataclass
class BuiltContender:
    """A contender after its first steps."""

    contender: "Contender"
    first_step_s: float
    resident: int
    peak: int
    """Bytes in these steps. A CUDA graph allocates when it is recorded, not when it is replayed."""


Results = dict[str, tuple[BuiltContender, list[StepCost]]]


def _measure(config: Config, device: Any, options: TrainBench, world: int) -> Results:
    from holdfast.bench.contenders import PEERS, HoldfastContender, is_gpt2, random_batch
    from holdfast.parallel.layout import layout_of
    from holdfast.parallel.mesh import build_grid

    grid = build_grid(layout_of(config.parallel, world), device)
    batches = [random_batch(config, device, seed + 1000 * grid.data_rank) for seed in range(8)]
    builders: dict[str, Callable[[], Contender]] = {"holdfast": lambda: HoldfastContender(config, grid)}
    if world > 1 and options.against:
        log("several ranks: only holdfast is measured")
    elif options.against:
        modules = {"nanogpt": "torch", "hf": "transformers"}
        against = [name for name in options.against if name != "nanogpt" or is_gpt2(config)]
        if len(against) < len(options.against):
            log("nanogpt is left out: it has GPT-2's layers only")
        for name in installed({name: modules[name] for name in against}):
            builders[name] = functools.partial(PEERS[name], config, device)
    built = {}
    for name, build in builders.items():
        log(f"{name}: building, first steps")
        built[name] = _build(build, batches, device)
    rounds = max(1, options.rounds)
    steps = max(1, options.steps // rounds)
    turns = {name: functools.partial(_turn, one, batches, device, steps) for name, one in built.items()}
    costs = run_rounds(turns, rounds, "train")
    return {name: (built[name], costs[name]) for name in built}


def _profile(config: Config, device: Any, results: Results) -> Tables:
    from holdfast.bench.contenders import HoldfastContender, random_batch
    from holdfast.bench.kernel_profile import STEPS, profile_step

    built, costs = results["holdfast"]
    assert isinstance(built.contender, HoldfastContender)
    batches = [random_batch(config, device, seed) for seed in range(STEPS)]
    rows = profile_step(built.contender, batches, config, median(costs, lambda cost: cost.wall))
    return {"holdfast's step by kind of kernel": rows}


def _build(build: "Callable[[], Contender]", batches: list[Any], device: Any) -> BuiltContender:
    """Builds a contender and takes the steps that are not measured."""
    from holdfast.bench.phases import DeviceMemory

    memory = DeviceMemory(device)
    before = memory.now()
    memory.reset_peak()
    contender = build()
    start = time.perf_counter()
    contender.step(batches[0], _ignore_phase)
    _synchronize(device)
    first = time.perf_counter() - start
    for batch in batches[1:5]:  # a CUDA graph is recorded in the fourth step
        contender.step(batch, _ignore_phase)
    _synchronize(device)
    return BuiltContender(contender, first, memory.now() - before, memory.peak() - before)


def _turn(built: BuiltContender, batches: list[Any], device: Any, steps: int) -> StepCost:
    """Steps timed as a whole, then one more, timed by phase."""
    from holdfast.bench.phases import DeviceMemory, PhaseClock

    step, memory = built.contender.step, DeviceMemory(device)
    others = memory.now() - built.resident
    memory.reset_peak()
    step(batches[-1], _ignore_phase)  # the contender before it left other things in the caches
    _synchronize(device)
    start, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        loss = step(batches[number % len(batches)], _ignore_phase)
    _synchronize(device)
    wall, cpu = (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps
    peak, clock = max(built.peak, memory.peak() - others), PhaseClock(device)
    step(batches[0], clock)
    return StepCost(wall, cpu, clock.milliseconds(), peak, float(loss))


def _ignore_phase(_: str) -> None: ...


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tables(config: Config, device: Any, results: Results, world: int) -> Tables:
    import torch

    from holdfast.bench.phases import median_phases
    from holdfast.models.flops import flops_per_token, peak_flops
    from holdfast.parallel.layout import padded_vocab_size
    from holdfast.train.model_families import family_of

    assert config.model.vocab_size is not None
    parallel = config.parallel
    padded = padded_vocab_size(config.model.vocab_size, config.model, parallel.tensor_model_parallel_size)
    flops = flops_per_token(config.model, config.data.seq_length, padded, family_of(config).predicted)
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    tokens = (config.train.global_batch_size or 0) * config.data.seq_length // model_ranks
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    own = median(results["holdfast"][1], lambda one: one.wall)
    speeds: list[Row] = []
    for name, (built, costs) in results.items():
        seconds = median(costs, lambda one: one.wall)
        rate, walls, peak = tokens / seconds, [one.wall * 1e3 for one in costs], peak_flops(device_name)
        speeds.append(
            {
                "contender": name,
                "tokens/s": round(rate),
                "holdfast is": f"{seconds / own:.3f} ×",
                "TFLOP/s per rank": round(rate * flops / world / 1e12, 3),
                "MFU": f"{rate * flops / world / peak:.1%}" if peak else "unknown",
                "step ms": round(seconds * 1e3, 2),
                "fastest to slowest round": f"{min(walls):.2f}–{max(walls):.2f}",
                "CPU ms": round(median(costs, lambda one: one.cpu) * 1e3, 1),
                "peak GiB": round(max(one.peak for one in costs) / GIB, 2),
                "first step s": round(built.first_step_s, 4),
                "loss": round(costs[-1].loss, 3),
            }
        )
    splits: list[Row] = []
    for name, (_, costs) in results.items():
        phases = median_phases([one.phases for one in costs])
        splits.append({"contender": name, **{f"{phase} ms": round(spent, 2) for phase, spent in phases.items()}})
    precision = "bf16" if config.train.bf16 else "fp16" if config.train.fp16 else "fp32"
    precision += f" with fp8 ({config.train.fp8_recipe})" if config.train.fp8 else ""
    shape = f"{config.model.num_layers} layers × {config.model.hidden_size}, vocabulary {padded}, {precision}"
    batch = f"batch {config.train.global_batch_size} × {config.data.seq_length}"
    title = f"training {shape}, {batch}, on {world} × {device_name}, torch {torch.__version__}"
    return {title: speeds, "where a step's time goes (on the device)": splits}


if __name__ == "__main__":
    from holdfast.cli import run as run_verb

    run_verb(["bench", "train", *sys.argv[1:]])
