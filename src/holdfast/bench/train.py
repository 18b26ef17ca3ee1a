"""`bench train`: whole training steps on random tokens, beside a plain compiled GPT-2 and Hugging Face's model.

Contenders take turns within a round, so that whatever else the machine does hits them alike; the median round is reported.
The first step, which compiles, is told apart. CPU time, summed over threads, is what a busy machine disturbs least.
"""

import importlib.util
import os
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.bench.command import Tables, refuse_unknown, show
from holdfast.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, read_config
from holdfast.system.progress import log

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Measure training steps on random tokens: tokens/s, MFU, time per phase, and peak memory.

    Examples:

      holdfast bench train
      holdfast bench train --config gpt2_345m --batch-size 32 --steps 40
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
    device = pick_device()
    chosen = _prepare(options.config, device.type == "cuda", options.batch_size, options.seq_length)
    if device.type == "cpu" and (chosen.train.bf16 or chosen.train.fp16):
        avoid_amx_traps()
    torch.set_float32_matmul_precision("high")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    against = options.against
    if world > 1 and against:
        log("several ranks: only holdfast is measured")
        against = ()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        courses = _measure(
            chosen, device, against, max(1, options.rounds), max(1, options.steps // max(1, options.rounds))
        )
    finally:
        dist.destroy_process_group()
    return _tables(chosen, device, courses, world)


def _prepare(path: Path | None, cuda: bool, batch_size: int | None, seq_length: int | None) -> Config:
    """The configuration to measure: complete, one device's worth, nothing read from files."""
    if path is not None:
        config = read_config(path)
    elif cuda:
        config = Config(
            model=ModelConfig(
                num_layers=24, hidden_size=1024, num_attention_heads=16, vocab_size=50257, openai_gelu=True
            ),
            data=DataConfig(seq_length=1024),
            train=TrainConfig(micro_batch_size=32, bf16=True),
            optimizer=OptimizerConfig(weight_decay=0.1, adam_beta2=0.95),
        )
    else:
        config = Config(
            model=ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=4096, openai_gelu=True),
            data=DataConfig(seq_length=256),
            train=TrainConfig(micro_batch_size=4),
        )
    size = batch_size or config.train.micro_batch_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = replace(
        config.model, vocab_size=config.model.vocab_size or 50257, hidden_dropout=0.0, attention_dropout=0.0
    )
    if seq_length is not None and (config.model.max_position_embeddings or seq_length) < seq_length:
        model = replace(model, max_position_embeddings=seq_length)
    data = replace(config.data, seq_length=seq_length or config.data.seq_length)
    train = replace(config.train, micro_batch_size=size, global_batch_size=size * world, rampup_batch_size=())
    # one optimizer for all of them: fused AdamW
    return replace(config, model=model, data=data, train=train, optimizer=replace(config.optimizer, optimizer="adam"))


@dataclass
class _Course:
    """One contender's measurements."""

    contender: Any
    first_step_s: float
    resident: int
    seconds_per_step: list[float] = field(default_factory=list)
    cpu_seconds_per_step: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    peak: int = 0
    loss: float = 0.0


def _measure(config: Config, device: Any, against: tuple[str, ...], rounds: int, steps: int) -> list[_Course]:
    from holdfast.bench.contenders import PEERS, Holdfast, random_batch
    from holdfast.parallel.layout import layout_of
    from holdfast.parallel.mesh import build_grid

    world = int(os.environ.get("WORLD_SIZE", "1"))
    grid = build_grid(layout_of(config.parallel, world), device)
    batches = [random_batch(config, device, seed + 1000 * grid.data_rank) for seed in range(8)]
    makers: list[tuple[str, Any]] = [("holdfast", lambda: Holdfast(config, grid))]
    for name in against:
        if name == "nanogpt" and config.model.model_type != "gpt":
            continue
        if name == "hf" and importlib.util.find_spec("transformers") is None:
            log("hf is left out: transformers is not installed")
            continue
        makers.append((name, lambda name=name: PEERS[name](config, device)))
    courses = []
    for name, make in makers:
        log(f"{name}: building, first steps")
        courses.append(_start(make, batches, device))
    for number in range(rounds):
        for course in courses:
            _turn(course, batches, device, steps)
        log(f"round {number + 1} of {rounds} done")
    return courses


def _start(make: Any, batches: list[Any], device: Any) -> _Course:
    """Builds a contender and takes the steps that nobody counts."""
    from holdfast.bench.phases import Memory

    memory = Memory(device)
    before = memory.now()
    contender = make()
    start = time.perf_counter()
    contender.step(batches[0], _nothing)
    _wait(device)
    first = time.perf_counter() - start
    for batch in batches[1:3]:
        contender.step(batch, _nothing)
    _wait(device)
    return _Course(contender, first, memory.now() - before)


def _turn(course: _Course, batches: list[Any], device: Any, steps: int) -> None:
    """A contender's share of a round: steps timed as a whole, then one taken apart into phases."""
    from holdfast.bench.phases import Memory, PhaseClock

    memory = Memory(device)
    others = memory.now() - course.resident
    memory.forget_peak()
    course.contender.step(batches[-1], _nothing)  # whoever took a turn before left other things in the caches
    _wait(device)
    start, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        loss = course.contender.step(batches[number % len(batches)], _nothing)
    _wait(device)
    course.seconds_per_step.append((time.perf_counter() - start) / steps)
    course.cpu_seconds_per_step.append((time.process_time() - cpu) / steps)
    course.loss = float(loss)
    course.peak = max(course.peak, memory.peak() - others)
    clock = PhaseClock(device)
    course.contender.step(batches[0], clock)
    course.phases.append(clock.milliseconds())


def _nothing(_: str) -> None: ...


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tables(config: Config, device: Any, courses: list[_Course], world: int) -> dict[str, list[dict[str, Any]]]:
    import torch

    from holdfast.bench.phases import median_phases
    from holdfast.models.flops import flops_per_token, peak_flops
    from holdfast.parallel.layout import padded_vocab_size
    from holdfast.train.model_families import family_of

    assert config.model.vocab_size is not None
    padded = padded_vocab_size(config.model.vocab_size, config.model, config.parallel.tensor_model_parallel_size)
    flops = flops_per_token(config.model, config.data.seq_length, padded, family_of(config).predicted)
    tokens = (config.train.global_batch_size or 0) * config.data.seq_length // _model_ranks(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name)
    speeds, splits = [], []
    own = statistics.median(courses[0].seconds_per_step)
    for course in courses:
        seconds = statistics.median(course.seconds_per_step)
        rate = tokens / seconds
        speeds.append(
            {
                "contender": course.contender.name,
                "tokens/s": round(rate),
                "holdfast is": f"{seconds / own:.3f} ×",
                "TFLOP/s per rank": round(rate * flops / world / 1e12, 3),
                "MFU": f"{rate * flops / world / peak:.1%}" if peak else "unknown",
                "step ms": round(seconds * 1e3, 2),
                "fastest to slowest round": f"{min(course.seconds_per_step) * 1e3:.2f}–{max(course.seconds_per_step) * 1e3:.2f}",
                "CPU ms": round(statistics.median(course.cpu_seconds_per_step) * 1e3, 1),
                "peak GiB": round(course.peak / GIB, 2),
                "first step s": round(course.first_step_s, 4),
                "loss": round(course.loss, 3),
            }
        )
        phases = {f"{phase} ms": round(spent, 2) for phase, spent in median_phases(course.phases).items()}
        splits.append({"contender": course.contender.name, **phases})
    precision = "bf16" if config.train.bf16 else "fp16" if config.train.fp16 else "fp32"
    shape = f"{config.model.num_layers} layers × {config.model.hidden_size}, vocabulary {padded}, {precision}"
    batch = f"batch {config.train.global_batch_size} × {config.data.seq_length}"
    title = f"training {shape}, {batch}, on {world} × {name}, torch {torch.__version__}"
    return {title: speeds, "where a step's time goes (on the device)": splits}


def _model_ranks(config: Config) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size


if __name__ == "__main__":
    from holdfast.cli import run as run_verb

    run_verb(["bench", "train", *sys.argv[1:]])
