"""The story of a training run, as one rank lives it.

A step is a pure function of the state and of how many samples were consumed: the batch comes from (seed, consumed samples), the
dropout from (seed, step), the learning rate from the consumed samples. So a run that was killed and resumed ends as one that
was not.
"""

import gc
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.config import Config
from holdfast.models.dropout import DropoutKeys
from holdfast.models.flops import flops_per_token
from holdfast.parallel.layout import ParallelLayout, padded_vocab_size
from holdfast.parallel.mesh import Grid
from holdfast.parallel.pipeline import TiedEmbedding
from holdfast.system.progress import log
from holdfast.train.metrics import Iteration, Reporter, name_terms
from holdfast.train.model_families import BatchFeed, build_stages, compute_dtype, family_of
from holdfast.train.optim import GradientNorm, HostCopy, build_loss_scale, build_optimizer, clip_and_step
from holdfast.train.schedule import batches_of, schedule_of
from holdfast.train.state import Progress, load_checkpoint, open_snapshots
from holdfast.train.step import ForwardBackward


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after all its steps, or stopped on request with its state on disk."""

    step: int
    finished: bool


def run_rank(config: Config, grid: Grid, feed: BatchFeed) -> Outcome:
    """Trains from wherever the run stands to its end."""
    return _Run(config, grid, feed).to_the_end()


class _Run:
    def __init__(self, config: Config, grid: Grid, feed: BatchFeed) -> None:
        self.config, self.grid, self.feed = config, grid, feed
        assert config.model.vocab_size is not None
        self.stages = build_stages(config, grid, config.model.vocab_size)
        tied = TiedEmbedding(self.stages, grid, not config.model.untie_embeddings_and_output_weights)
        self.family = family_of(config)
        self.passes = ForwardBackward(self.stages, grid, tied, self.family.terms, self._shapes())
        self.norm = GradientNorm(self.stages, grid, tied.copy)
        self.optimizer = build_optimizer(self.stages, config.optimizer)
        self.loss_scale = build_loss_scale(config.optimizer) if config.train.fp16 else None
        self.batches = batches_of(config, grid.layout.data)
        self.schedule = schedule_of(config, self.batches)
        self.iterations = self.batches.iterations(config.train.train_iters)
        self.progress = Progress()
        self.extra = {"progress": self.progress, **({"loss_scale": self.loss_scale} if self.loss_scale else {})}
        self.snapshots = open_snapshots(config, grid, self.stages, self.optimizer, self.extra)
        self.pending: Iteration | None = None
        self.stop_agreed = False

    def _shapes(self) -> dict[str, Any]:
        config = self.config
        return {
            "micro_batch_size": config.train.micro_batch_size,
            "seq_length": config.data.seq_length,
            "hidden_size": config.model.hidden_size,
            "sequence_shards": self.grid.layout.tensor if config.parallel.sequence_parallel else 1,
            "dtype": compute_dtype(config),
        }

    def to_the_end(self) -> Outcome:
        config, progress = self.config, self.progress
        # The run's own newest state, in memory or on disk, comes before --load.
        if self.snapshots.restore() == 0:
            load_checkpoint(config, self.grid, self.stages, self.optimizer, self.extra)
        self.reporter = self._reporter(self.grid.layout)
        gc.freeze()
        saved = progress.step
        while progress.step < self.iterations and not self.stop_agreed:
            self.one_step()
            if config.train.save_interval and progress.step % config.train.save_interval == 0:
                self.snapshots.save(progress.step)
                saved = progress.step
        if saved != progress.step:
            self.snapshots.save(progress.step)
        self.snapshots.close()
        self.reporter.close()
        return Outcome(progress.step, progress.step >= self.iterations)

    def one_step(self) -> None:
        """One batch, one gradient, one change of the weights (or none, if the gradient is not finite)."""
        progress = self.progress
        size = self.batches.size(progress.consumed_samples)
        lr = self.schedule.lr(progress.consumed_samples)
        seed_dropout(self.config, progress.step, self.grid, self.stages)
        batch = self.feed.training(progress.consumed_samples, size)
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        self.optimizer.zero_grad(set_to_none=True)
        means = self.passes.gradients(batch, scale)
        self.snapshots.commit()  # before the all-reduce: that one is the commit barrier of the last snapshot
        stall_ms = self.snapshots.stall_seconds * 1e3
        sums = self.norm.reduce(*means)
        sums[0] /= scale
        arriving = HostCopy(sums)
        self.update_weights(sums[0], scale, lr)
        sums = arriving.wait()
        overflow = not math.isfinite(sums[0])
        if self.loss_scale:
            self.loss_scale.update(overflow)
        elif overflow:  # with fp16 an overflow is the scale's business
            self.snapshots.report_nan()
        progress.advance(size, size * self.config.data.seq_length, overflow)
        self.pending = Iteration(
            progress.step,
            lr,
            size,
            progress.consumed_samples,
            progress.consumed_tokens,
            sums,
            stall_ms,
            scale if self.loss_scale else None,
            time.perf_counter(),
        )
        if self._evaluation_is_due():
            self.evaluate()
        # While the device changes the weights; before the snapshot, so that a run never continues from a step without a record.
        self.report_pending()
        self.snapshots.take(progress.step)
        self.stop_agreed = self.snapshots.stop_requested()

    def _evaluation_is_due(self) -> bool:
        train = self.config.train
        return bool(train.eval_interval and train.eval_iters) and self.progress.step % train.eval_interval == 0

    def update_weights(self, norm: Tensor, scale: float, lr: float) -> None:
        """Clips and steps, or leaves everything as it is because the gradient is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clip_and_step(self.optimizer, norm, self.config.optimizer.clip_grad, scale)

    def evaluate(self) -> None:
        """Mean loss over eval_iters batches of the validation split; reported with the iteration it follows."""
        train = self.config.train
        start = (self.progress.step // train.eval_interval - 1) * train.eval_iters * self.batches.full
        total = torch.zeros(len(self.family.terms), dtype=torch.float64, device=self.grid.device)
        for stage in self.stages:
            stage.eval()
        for index in range(train.eval_iters):
            batch = self.feed.validation(start + index * self.batches.full, self.batches.full)
            if batch is None:
                break
            total += self.passes.means(batch).double() / train.eval_iters
        for stage in self.stages:
            stage.train()
        dist.all_reduce(total)
        if self.pending is not None and self.feed.has_validation:
            terms = name_terms(self.family.terms, total)
            self.pending.extra = {f"validation_{name}": value for name, value in terms.items()}
            self.pending.extra["validation_perplexity"] = math.exp(min(float(total[0]), 50.0))
        self.report_pending()
        self.reporter.restart_clock()

    def report_pending(self) -> None:
        if self.pending is None:
            return
        self.reporter.report(self.pending, self.progress.skipped)
        self.pending = None

    def _reporter(self, layout: ParallelLayout) -> Reporter:
        config = self.config
        assert config.model.vocab_size is not None
        padded = padded_vocab_size(config.model.vocab_size, config.model, layout.tensor)
        return Reporter(
            Path(config.train.save) if config.train.save else None,
            active=self.grid.rank == 0,
            iterations=self.iterations,
            log_interval=config.log.log_interval,
            terms=self.family.terms,
            flops_per_token=flops_per_token(config.model, config.data.seq_length, padded, self.family.predicted),
            tokens_per_sample=config.data.seq_length,
            world=layout.world,
            device=self.grid.device,
            tensorboard=config.log.tensorboard,
        )


def seed_dropout(config: Config, step: int, grid: Grid, stages: Sequence[nn.Module]) -> None:
    """Dropout is drawn from (seed, step, data rank, stage): the same after a resume.

    Tensor-parallel ranks draw different masks for what each holds a shard of (attention heads; tokens under sequence
    parallelism), and by shared keys equal masks for what each holds a copy of.
    """
    if not (config.model.hidden_dropout or config.model.attention_dropout):
        return
    place = f"{config.train.seed}:{step}:{grid.data_rank}:{grid.index('pipeline')}"
    torch.manual_seed(_seed_of(f"{place}:tensor {grid.index('tensor')}"))
    for index, stage in enumerate(stages):
        if isinstance(stage.dropout_keys, DropoutKeys):
            stage.dropout_keys.seed(_seed_of(f"{place}:part {index}"))


def _seed_of(place: str) -> int:
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


def log_start(config: Config, layout: ParallelLayout) -> None:
    log(f"training {config.model.model_type} on {layout.words()}")
