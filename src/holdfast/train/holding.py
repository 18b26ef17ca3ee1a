"""The run's hold on its state: where it resumes from, when it is snapshot and saved, when it is asked to stop.

A run with a folder has memory snapshots under it (package `snapshot`), and everything on disk is written from them. A run without
a folder keeps nothing.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import checkpoint
from holdfast.config import Config
from holdfast.models.initial import VOCABULARY_ROWS
from holdfast.parallel.mesh import Grid
from holdfast.snapshot import Snapshots
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log
from holdfast.train.optim import LossScale

# With snapshot_interval 0 only saves copy the state.
NEVER = 1 << 60


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

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        for key, value in state.items():
            setattr(self, key, value)


class Holding:
    """Restores, commits, snapshots and saves this rank's share of the run."""

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
        self._progress = progress
        self._extra: dict[str, Any] = {"progress": progress, **({"loss_scale": loss_scale} if loss_scale else {})}
        self._padded_rows = dict.fromkeys(VOCABULARY_ROWS, config.model.vocab_size or 0)
        self.folder = Path(config.train.save) if config.train.save else None
        self._snapshots = self._begin_snapshots(self.folder) if self.folder else None

    def _begin_snapshots(self, folder: Path) -> Snapshots:
        config, options = self._config, self._config.snapshot
        return Snapshots(
            folder.resolve().name,
            self._parts,
            self._optimizer,
            self._extra,
            folder,
            interval=options.snapshot_interval or NEVER,
            mode=options.snapshot_mode,
            memory=options.snapshot_dir,
            replica_group=self._grid.group("replica"),
            padded_rows=self._padded_rows,
            layout={"words": self._grid.layout.words(), **asdict(self._grid.layout)},
            shared={"config": asdict(config), "true_vocab_size": config.model.vocab_size},
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
            hang_seconds=options.hang_timeout or 600.0,
            kill_hung=options.hang_timeout > 0,
        )

    def restore(self) -> None:
        """Continues from the run's own newest state, in memory or on disk, else from --load, else starts afresh."""
        if self._snapshots is not None and self._snapshots.restore() > 0:
            return
        train = self._config.train
        if not train.load:
            return
        state = checkpoint.State(
            self._parts, self._optimizer, replica_group=self._grid.group("replica"), padded_rows=self._padded_rows
        )
        found = checkpoint.load_newest(
            train.load, state, optimizer=not train.no_load_optim and not train.finetune, weights_only=train.finetune
        )
        if found is None:
            raise HoldfastError(f"there is no checkpoint in {train.load}; give a run folder, or a step folder of one")
        path, shared = found
        if not train.finetune:
            for name, part in self._extra.items():
                if name in shared.get("extra", {}):
                    part.load_state_dict(shared["extra"][name])
        log(f"loaded {path}" + ("; starting at step 0 with its weights" if train.finetune else ""))

    def commit(self) -> float:
        """Waits until the last snapshot is whole; the milliseconds that snapshots cost since the commit before."""
        if self._snapshots is None:
            return 0.0
        self._snapshots.commit()
        return self._snapshots.stall_seconds * 1e3

    def take(self) -> bool:
        """Begins the snapshot of the step just done; whether all ranks have agreed to stop after it."""
        if self._snapshots is None:
            return False
        self._snapshots.take(self._progress.step)
        return self._snapshots.stop_requested()

    def save(self) -> None:
        """Has the step just done written to disk, from memory, while training goes on."""
        if self._snapshots is not None:
            self._snapshots.save(self._progress.step)

    def report_nan(self) -> None:
        if self._snapshots is not None:
            self._snapshots.report_nan()

    def close(self) -> None:
        """What was asked to be saved is on disk afterwards."""
        if self._snapshots is not None:
            self._snapshots.close()
