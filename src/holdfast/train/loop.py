"""The training loop of one rank.

A step is a pure function of the state and of the number of consumed samples: (seed, consumed samples) decides the batch, (seed,
step) the dropout masks, the consumed samples the learning rate. So a run that is killed and resumed ends bit-identical to an
undisturbed one.
"""

import gc
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.config import Config
from holdfast.models.dropout import DropoutKeys
from holdfast.models.flops import flops_per_token
from holdfast.parallel.layout import padded_vocab_size
from holdfast.parallel.mesh import Grid
from holdfast.parallel.pipeline import TiedEmbedding
from holdfast.train.metrics import Iteration, Reporter, name_terms
from holdfast.train.model_families import BatchFeed, build_stages, compute_dtype, family_of, stage_shapes
from holdfast.train.optim import GradientNorm, HostCopy, build_loss_scale, build_optimizer, clip_and_step
from holdfast.train.schedule import batches_of, schedule_of
from holdfast.train.state import Progress, load_checkpoint, open_snapshots
from holdfast.train.step import ForwardBackward


class TrainingRun:
    """This rank's share of the run: pipeline stages, optimizer, schedules, snapshots."""

    def __init__(self, config: Config, grid: Grid, feed: BatchFeed) -> None:
        self.config, self.grid, self.feed = config, grid, feed
        assert config.model.vocab_size is not None
        self.stages = build_stages(config, grid, config.model.vocab_size)
        tied = TiedEmbedding(self.stages, grid, not config.model.untie_embeddings_and_output_weights)
        self.family = family_of(config)
        self.passes = ForwardBackward(self.stages, grid, tied, self.family.terms, stage_shapes(config, grid))
        self.norm = GradientNorm(self.stages, grid, tied.copy)
        self.optimizer = build_optimizer(self.stages, config.optimizer, compute_dtype(config))
        self.loss_scale = build_loss_scale(config.optimizer) if config.train.fp16 else None
        self.batches = batches_of(config, grid.layout.data)
        self.schedule = schedule_of(config, self.batches)
        self.iterations = self.batches.iterations(config.train.train_iters)
        self.progress = Progress()
        self.extra: dict[str, Any] = {"progress": self.progress}
        if self.loss_scale:
            self.extra["loss_scale"] = self.loss_scale
        self.snapshots = open_snapshots(config, grid, self.stages, self.optimizer, self.extra)
        self.stop_agreed = False

    def train(self) -> bool:
        """Trains from the newest state to the last step; False if the run was asked to stop before, with its state saved."""
        config, progress = self.config, self.progress
        # The run's own newest state, in memory or on disk, comes before --load.
        if self.snapshots.restore() == 0:
            load_checkpoint(config, self.grid, self.stages, self.optimizer, self.extra)
        self.reporter = self._reporter()
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
        return progress.step >= self.iterations

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
        self.snapshots.commit()  # before the all-reduce, which is the commit barrier of the last snapshot
        stall_ms = self.snapshots.stall_seconds * 1e3
        sums = self.norm.reduce(*means)
        sums[0] /= scale
        on_host = HostCopy(sums)
        self._update_weights(sums[0], scale, lr)
        sums = on_host.wait()
        overflow = not math.isfinite(sums[0])
        if self.loss_scale:
            self.loss_scale.update(overflow)
        elif overflow:  # with fp16 the loss scale handles it
            self.snapshots.report_nan()
        progress.advance(size, size * self.config.data.seq_length, overflow)
        done = Iteration(
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
        evaluated = self._evaluation_is_due()
        if evaluated:
            done.extra = self.evaluate()
        # While the device updates the weights; before the snapshot, so that a run never resumes from a step without a record.
        self.reporter.report(done, progress.skipped)
        if evaluated:
            self.reporter.restart_clock()
        self.snapshots.take(progress.step)
        self.stop_agreed = self.snapshots.stop_requested()

    def _update_weights(self, norm: Tensor, scale: float, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clip_and_step(self.optimizer, norm, self.config.optimizer.clip_grad, scale)

    def _evaluation_is_due(self) -> bool:
        train = self.config.train
        return bool(train.eval_interval and train.eval_iters) and self.progress.step % train.eval_interval == 0

    def evaluate(self) -> dict[str, float]:
        """Mean of each term over eval_iters batches of the validation split; empty without one."""
        if not self.feed.has_validation:
            return {}
        train = self.config.train
        start = (self.progress.step // train.eval_interval - 1) * train.eval_iters * self.batches.full
        total = torch.zeros(len(self.family.terms), dtype=torch.float64, device=self.grid.device)
        for stage in self.stages:
            stage.eval()
        for index in range(train.eval_iters):
            batch = self.feed.validation(start + index * self.batches.full, self.batches.full)
            total += self.passes.means(batch).double() / train.eval_iters
        for stage in self.stages:
            stage.train()
        dist.all_reduce(total)
        terms = {f"validation_{name}": value for name, value in name_terms(self.family.terms, total).items()}
        return {**terms, "validation_perplexity": math.exp(min(float(total[0]), 50.0))}

    def _reporter(self) -> Reporter:
        config, layout = self.config, self.grid.layout
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
    """Seeds dropout with (seed, step, data rank, stage): a resumed run draws the same masks.

    Tensor-parallel ranks draw different masks for their shards (attention heads; tokens under sequence parallelism), and by
    shared keys equal masks for activations that each of them holds a copy of.
    """
    if not (config.model.hidden_dropout or config.model.attention_dropout):
        return
    place = f"{config.train.seed}:{step}:{grid.data_rank}:{grid.index('pipeline')}"
    torch.manual_seed(_seed_of(f"{place}:tensor {grid.index('tensor')}"))
    for index, stage in enumerate(stages):
        if isinstance(stage.dropout_keys, DropoutKeys):
            stage.dropout_keys.seed(_seed_of(f"{place}:part {index}"))  # "part": runs of earlier versions resume alike


def _seed_of(place: str) -> int:
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
