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
from holdfast.parallel.zero import RowGather, updated_parameters
from holdfast.train.eval_samples import EvalSamples
from holdfast.train.kernel_choice import GraphChoice
from holdfast.train.learning_rates import group_schedules, set_rates
from holdfast.train.metrics import Iteration, Reporter, name_terms
from holdfast.train.model_families import (
    BatchFeed,
    build_stages,
    compute_dtype,
    family_of,
    initialize_stages,
    stage_shapes,
)
from holdfast.train.optim import (
    GradientNorm,
    GroupSettings,
    HostCopy,
    build_loss_scale,
    build_optimizer,
    clip_and_step,
)
from holdfast.train.profiling import StepProfiler, profiled_steps
from holdfast.train.rank_times import RankTimes
from holdfast.train.schedule import batches_of, schedule_of
from holdfast.train.spike_guard import SpikeGuard
from holdfast.train.spike_response import SpikeResponse
from holdfast.train.state import Progress, load_checkpoint, open_snapshots
from holdfast.train.step import ForwardBackward
from holdfast.train.timeline import StartTimeline
from holdfast.train.trackers.process import wants_trackers


class TrainingRun:
    """This rank's share of the run: pipeline stages, optimizer, schedules, snapshots."""

    def __init__(self, config: Config, grid: Grid, feed: BatchFeed, timeline: StartTimeline) -> None:
        self.config, self.grid, self.feed, self._timeline = config, grid, feed, timeline
        assert config.model.vocab_size is not None
        self.stages = build_stages(config, grid, config.model.vocab_size)
        updated = updated_parameters(self.stages, grid)
        tied = TiedEmbedding(self.stages, grid, not config.model.untie_embeddings_and_output_weights, updated)
        self.family = family_of(config)
        terms, shapes, graph = self.family.terms, stage_shapes(config, grid), config.train.cuda_graph
        choice = GraphChoice.of(config, grid)
        self.passes = ForwardBackward(self.stages, grid, tied, updated, terms, shapes, graph, choice)
        self.norm = GradientNorm(updated.values(), grid, tied.copy)
        self.optimizer = build_optimizer(self.stages, config.optimizer, compute_dtype(config), updated)
        self.gather_rows = RowGather(updated, grid)
        self.loss_scale = build_loss_scale(config.optimizer) if config.train.fp16 else None
        self.batches = batches_of(config, grid.layout.data)
        self.schedule = schedule_of(config, self.batches)
        self._schedules = group_schedules(self.optimizer, self.schedule)
        self._settings = GroupSettings(self.optimizer)
        self.iterations = self.batches.iterations(config.train.train_iters)
        self.progress = Progress()
        self.extra: dict[str, Any] = {"progress": self.progress}
        if self.loss_scale:
            self.extra["loss_scale"] = self.loss_scale
        timeline.mark("model")
        self.snapshots = open_snapshots(config, grid, self.stages, self.optimizer, self.extra, timeline.journal)
        timeline.mark("open snapshots")
        self.spikes = self._spike_response()
        self.rank_times = RankTimes(self._folder, grid, config.parallel.nproc_per_node)
        samples = config.train.eval_samples and config.train.save
        self.samples = EvalSamples(config, grid, self.stages, feed) if samples else None
        self.stop_agreed = False

    def _spike_response(self) -> SpikeResponse | None:
        options = self.config.optimizer
        if options.spike_guard is None:
            return None
        guard = SpikeGuard(self.progress, options.spike_guard)
        return SpikeResponse(guard, self.progress, self.snapshots, rewinds=options.spike_action == "rewind")

    @property
    def _folder(self) -> Path | None:
        return Path(self.config.train.save) if self.config.train.save else None

    def train(self) -> bool:
        """Trains from the newest state to the last step; False if the run was asked to stop before, with its state saved."""
        config, progress = self.config, self.progress
        # The run's own newest state, in memory or on disk, comes before --load.
        if self.snapshots.restore() == 0:
            self._initialize()
            load_checkpoint(config, self.grid, self.stages, self.optimizer, self.extra)
        self._settings.check_state(config.optimizer.optimizer)
        self._timeline.mark("restore")
        self.reporter = self._reporter()
        profiler = StepProfiler(profiled_steps(config.log.profile), self._folder, self.grid.rank)
        gc.freeze()
        saved = progress.step
        while progress.step < self.iterations and not self.stop_agreed:
            with profiler.step(progress.step + 1):
                self.one_step()
            if config.train.save_interval and progress.step % config.train.save_interval == 0:
                self.snapshots.save(progress.step)
                saved = progress.step
        if saved != progress.step:
            self.snapshots.save(progress.step)
        self.snapshots.close()
        profiler.close()
        self.reporter.close()
        self.rank_times.close()
        if self.samples:
            self.samples.close()
        return progress.step >= self.iterations

    def rehearse(self) -> None:
        """One step from initial weights, in a process that is not a rank yet: it loads kernels and libraries."""
        self._initialize()
        self.reporter = self._reporter()
        self.one_step()

    def _initialize(self) -> None:
        assert self.config.model.vocab_size is not None
        initialize_stages(self.config, self.stages, self.config.model.vocab_size)

    def one_step(self) -> None:
        """One batch, one gradient, one change of the weights (or none: a gradient that is not finite, a loss spike)."""
        progress = self.progress
        size = self.batches.size(progress.consumed_samples)
        lr = self.schedule.lr(progress.consumed_samples)
        seed_dropout(self.config, progress.step, self.grid, self.stages)
        with self.rank_times.clock.own_waits():
            batch = self.feed.training(progress.consumed_samples, size)
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        self.optimizer.zero_grad(set_to_none=True)
        means = self.passes.gradients(batch, scale)
        with self.rank_times.clock.own_waits():
            self.snapshots.commit()  # before the all-reduce, which is the commit barrier of the last snapshot
        stall_ms = self.snapshots.stall_seconds * 1e3
        sums = self.norm.reduce(*means)
        sums[0] /= scale
        on_host = HostCopy(sums)
        threshold = self.spikes.guard.threshold() if self.spikes else math.inf
        # An optimizer changes nothing where the norm is not a number; the host does not wait for the comparison.
        norm = sums[0] if threshold == math.inf else torch.where(self._loss(sums) > threshold, math.nan, sums[0])
        self._update_weights(norm, scale)
        sums = on_host.wait()
        spiked = self.spikes is not None and self.spikes.check(float(self._loss(sums)), threshold)
        overflow = not math.isfinite(sums[0])
        if self.loss_scale:
            self.loss_scale.update(overflow)
        elif overflow:  # with fp16 the loss scale handles it
            self.snapshots.report_nan()
        progress.advance(size, size * self.config.data.seq_length, overflow or spiked)
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
        self.rank_times.step_done()
        evaluated = self._evaluation_is_due()
        if evaluated:
            done.extra = self.evaluate()
            if self.samples:
                self.samples.write(progress.step)
        # While the device updates the weights; before the snapshot, so that a run never resumes from a step without a record.
        self.reporter.report(done, progress.skipped)
        if self.reporter.is_due(done):
            self.rank_times.report(progress.step)
        if evaluated:
            self.reporter.restart_clock()
        self._timeline.step_done()
        self.snapshots.take(progress.step)
        self.stop_agreed = self.snapshots.stop_requested()

    def _update_weights(self, norm: Tensor, scale: float) -> None:
        self._settings.apply()  # a rewind loads those of its snapshot
        set_rates(self.optimizer, self._schedules, self.progress.consumed_samples)
        clip_and_step(self.optimizer, norm, self.config.optimizer.clip_grad, scale)
        self.gather_rows()

    def _loss(self, sums: Tensor) -> Tensor:
        rows = [row for row, name in enumerate(self.family.terms, start=1) if name.endswith("loss")]
        return sums[rows].sum()

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
            self._folder,
            active=self.grid.rank == 0,
            iterations=self.iterations,
            log_interval=config.log.log_interval,
            terms=self.family.terms,
            flops_per_token=flops_per_token(config.model, config.data.seq_length, padded, self.family.predicted),
            tokens_per_sample=config.data.seq_length,
            world=layout.world,
            device=self.grid.device,
            tensorboard=config.log.tensorboard,
            trackers=wants_trackers(config.log),
            constants={} if self.feed.padding_share is None else {"padding_share": self.feed.padding_share},
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
