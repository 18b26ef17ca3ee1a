"""The state of a run: how far it is, which snapshots keep it, where it resumes from.

A run with a folder keeps its state in memory snapshots (package `snapshot`); the keeper writes every checkpoint from them. A run
without a folder keeps nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
from holdfast.system.journal import BufferedJournal
from holdfast.system.progress import log

# With snapshot_interval 0 only saves copy the state.
NEVER = 1 << 60


@dataclass
class Progress:
    """Everything that the next step depends on, besides weights, optimizer and loss scale."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    recent_losses: list[float] = field(default_factory=list)
    """What --spike-guard compares with; empty without it."""

    def advance(self, samples: int, tokens: int, skipped: bool) -> None:
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.skipped += skipped

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, value)


class NoSnapshots:
    """Takes the place of `Snapshots` in a run without a folder: keeps nothing, never asks to stop."""

    stall_seconds = 0.0

    def restore(self) -> int:
        return 0

    def commit(self) -> None: ...

    def take(self, step: int) -> None: ...

    def save(self, step: int) -> None: ...

    def stop_requested(self) -> bool:
        return False

    def report_nan(self) -> None: ...

    def rewind(self) -> int | None:
        return None

    def event(self, name: str, **details: Any) -> None: ...

    def close(self) -> None: ...


def open_snapshots(
    config: Config,
    grid: Grid,
    stages: list[nn.Module],
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
    journal: Callable[[Path], BufferedJournal],
) -> Snapshots | NoSnapshots:
    """The snapshots of this rank's share of the run."""
    train, options = config.train, config.snapshot
    if not train.save:
        return NoSnapshots()
    folder = Path(train.save)
    return Snapshots(
        folder.resolve().name,
        stages,
        optimizer,
        extra,
        folder,
        interval=options.snapshot_interval or NEVER,
        max_slowdown=options.snapshot_max_slowdown,
        mode=options.snapshot_mode,
        memory=options.snapshot_dir,
        replica_group=grid.group("replica"),
        padded_rows=_padded_rows(config),
        layout={"words": grid.layout.words(), **asdict(grid.layout)},
        shared={"config": asdict(config), "true_vocab_size": config.model.vocab_size},
        keep_last=train.keep_last,
        keep_every=train.keep_every,
        hang_seconds=options.hang_timeout or 600.0,
        kill_hung=options.hang_timeout > 0,
        journal=journal,
    )


def load_checkpoint(
    config: Config, grid: Grid, stages: list[nn.Module], optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
) -> None:
    """Loads the newest checkpoint of --load: all of the state, or what --finetune and --no-load-optim leave of it."""
    train = config.train
    if not train.load:
        return
    state = checkpoint.State(stages, optimizer, replica_group=grid.group("replica"), padded_rows=_padded_rows(config))
    found = checkpoint.load_newest(
        train.load, state, optimizer=not train.no_load_optim and not train.finetune, weights_only=train.finetune
    )
    if found is None:
        raise HoldfastError(f"there is no checkpoint in {train.load}; give a run folder, or a step folder of one")
    path, shared = found
    if not train.finetune:
        for name, value in shared.get("extra", {}).items():
            if name in extra:
                extra[name].load_state_dict(value)
    log(f"loaded {path}" + ("; starting at step 0 with its weights" if train.finetune else ""))


def _padded_rows(config: Config) -> dict[str, int]:
    return dict.fromkeys(VOCABULARY_ROWS, config.model.vocab_size or 0)
