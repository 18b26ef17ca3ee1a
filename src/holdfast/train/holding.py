"""The run's hold on its state: where it resumes from, when it is saved, what the events file says about it."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast import checkpoint
from holdfast.config import Config
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.models.initial import VOCABULARY_ROWS
from holdfast.parallel.mesh import Grid
from holdfast.progress import say
from holdfast.train.optim import LossScale


@dataclass
class Progress:
    """How far the run is. Everything the next step depends on, besides weights and optimizer."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0

    def advance(self, samples: int, tokens: int, skipped: bool) -> None:
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.skipped += skipped


class Holding:
    """Restores, commits, snapshots and saves the state of this rank's share of the run."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        parts: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        loss_scale: LossScale | None,
    ) -> None:
        self._config, self._grid, self._parts, self._optimizer = config, grid, parts, optimizer
        self._progress, self._loss_scale = progress, loss_scale
        self.folder = Path(config.train.save) if config.train.save else None
        self._events = Journal(self.folder / "events.jsonl") if self.folder and grid.rank == 0 else None

    def restore(self) -> None:
        """Continues from the run's own newest state, else from --load, else starts afresh."""
        start = time.perf_counter()
        train = self._config.train
        source = None
        if self.folder and checkpoint.newest(self.folder):
            source, weights_only = self.folder, False
        elif train.load:
            source, weights_only = Path(train.load), train.finetune
        if source is None:
            self._event("started", world=self._grid.layout.world)
            return
        state = self._state()
        found = checkpoint.load_newest(source, state, optimizer=not train.no_load_optim, weights_only=weights_only)
        if found is None:
            raise HoldfastError(f"there is no checkpoint in {source}; give a run folder, or a step folder of one")
        path, shared = found
        if not weights_only:
            self._take_over(shared)
        seconds = time.perf_counter() - start
        say(f"resumed from {path} at step {self._progress.step} in {seconds:.2f} s")
        self._event("resumed", source="disk", step=self._progress.step, steps_lost=0, seconds=seconds)

    def commit(self) -> None: ...

    def take(self) -> float:
        return 0.0

    def save(self) -> None:
        """Writes the state to disk; afterwards `latest` names it."""
        if self.folder is None:
            return
        train, start = self._config.train, time.perf_counter()
        path = checkpoint.save(
            self.folder / "checkpoints",
            self._progress.step,
            self._state(),
            keep_last=train.keep_last,
            keep_every=train.keep_every,
        )
        seconds = time.perf_counter() - start
        say(f"saved {path} in {seconds:.2f} s")
        self._event("persisted", step=self._progress.step, path=str(path), seconds=seconds)

    def close(self, finished: bool, persisted_early: bool) -> None:
        if finished:
            self._event("finished", step=self._progress.step)

    def _event(self, name: str, **details: Any) -> None:
        if self._events:
            self._events.event(name, **details)

    def _state(self) -> checkpoint.State:
        shared = {
            **asdict(self._progress),
            "loss_scale": self._loss_scale.state() if self._loss_scale else None,
            "config": asdict(self._config),
            "true_vocab_size": self._config.model.vocab_size,
        }
        rows = dict.fromkeys(VOCABULARY_ROWS, self._config.model.vocab_size or 0)
        return checkpoint.State(
            self._parts, self._optimizer, shared=shared, replica_group=self._replicas(), padded_rows=rows
        )

    def _replicas(self) -> dist.ProcessGroup:
        return self._grid.group("replica")

    def _take_over(self, shared: dict[str, Any]) -> None:
        for key in asdict(self._progress):
            setattr(self._progress, key, shared[key])
        if self._loss_scale and shared.get("loss_scale"):
            self._loss_scale.restore(shared["loss_scale"])
