"""Run folders as a trainer leaves them behind, with a failure on the way."""

import math
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint.manifest import Manifest, write_manifest
from holdfast.config import Config, config_to_toml
from holdfast.system.journal import Journal

START = 1_790_000_000.0


def record(iteration: int, **changes: object) -> dict[str, object]:
    loss = 2.0 + 6.0 * math.exp(-iteration / 60) + 0.15 * math.sin(iteration * 12.9898) * math.cos(iteration * 7.1)
    return {
        "iteration": iteration, "loss": loss, "lr": 3e-4 * min(1, iteration / 20), "grad_norm": 1 + 2 * math.exp(-iteration / 40),
        "step_ms": 140 + 6 * math.sin(iteration), "tokens_per_s": 8192 / (0.14 + 0.006 * math.sin(iteration)), "tflops": 3.1,
        "mfu": 0.41, "snapshot_stall_ms": 0.4 + 0.1 * math.sin(iteration), "consumed_samples": 8 * iteration,
        "consumed_tokens": 8192 * iteration, "skipped_iterations": 0, **changes,
    }  # fmt: skip


def write_run(folder: Path, iterations: int = 200, fail_at: int = 120, back_to: int = 118) -> Path:
    folder.mkdir(parents=True)
    config = Config()
    config = replace(
        config, model=replace(config.model, vocab_size=4096), train=replace(config.train, train_iters=iterations)
    )
    (folder / "config.toml").write_text(config_to_toml(config))
    metrics = Journal(folder / "metrics.jsonl")
    for iteration in [*range(1, fail_at + 1), *range(back_to + 1, iterations + 1)]:
        extra = {"validation_loss": 2.2 + 6 * math.exp(-iteration / 60)} if iteration % 25 == 0 else {}
        metrics.write(record(iteration, **extra))
    metrics.close()
    events = Journal(folder / "events.jsonl")
    for after, event in (
        (0.0, {"event": "started", "world": 2}),
        (20.0, {"event": "failure", "kind": "died", "rank": 1, "step": fail_at, "cause": "killed by SIGKILL"}),
        (20.4, {"event": "failure", "kind": "exit", "rank": 1, "cause": "killed by SIGKILL", "exit_code": -9}),
        (23.0, {"event": "started", "world": 2}),
        (23.5, {"event": "resumed", "source": "memory", "step": back_to, "steps_lost": fail_at - back_to, "seconds": 0.42}),
        (44.0, {"event": "persisted", "step": iterations, "path": "checkpoints/step-00000200", "bytes": 5 << 20, "seconds": 0.8}),
        (44.2, {"event": "finished", "step": iterations}),
    ):  # fmt: skip
        events.write({"time": START + after, **event})
    events.close()
    for step in (100, iterations):
        path = folder / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "shard-00000-of-00001.safetensors").write_bytes(b"x" * (3 << 20))
        write_manifest(path, Manifest(step, 2, "plan", {}, []))
    (folder / "checkpoints" / "latest").write_text(f"step-{iterations:08d}\n")
    return folder
