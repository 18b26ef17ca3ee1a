"""Learning rates of single parameters: factors by name (--lr-mult), and Megatron's decoupled rate of embedding and output.

The configuration decides them at every start, as it decides --lr: a checkpoint records the rates of its groups, and a resumed run
takes none of them from there. A pattern matches whole parts of a parameter's name, and means the same parameters in
every layout, since names are global.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from holdfast.config import OptimizerConfig
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.schedule import LearningRateSchedule

if TYPE_CHECKING:  # flags are checked before torch is loaded
    from torch.optim import Optimizer

DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, order=True)
class Rate:
    """The peak and the floor of a learning rate schedule."""

    peak: float
    floor: float


def parse_factors(text: str | None) -> list[tuple[str, float]]:
    """(pattern, factor) of `PATTERN=FACTOR,...`, in order."""
    factors = []
    for entry in text.split(",") if text else ():
        pattern, equals, number = (word.strip() for word in entry.partition("="))
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not (pattern and equals and 0 <= factor < math.inf):
            raise UsageError(
                f"--lr-mult: '{entry}' is not PATTERN=FACTOR with a factor of 0 or more, as in embedding=0.1"
            )
        factors.append((pattern, factor))
    return factors


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern is a sequence of whole parts of the dotted name; * and ? stand for any characters."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def check_rates(options: OptimizerConfig, names: Sequence[str]) -> None:
    """Raises if a pattern decides the rate of no parameter; `names` are those of the whole model."""
    left = list(names)
    for pattern, _ in parse_factors(options.lr_mult):
        rest = [name for name in left if not matches(pattern, name)]
        if len(rest) == len(left):
            which = "no parameter" if len(left) == len(names) else "no parameter that an earlier pattern leaves"
            shown = ", ".join(name for name in names if ".layers." not in name or ".layers.0." in name)
            raise HoldfastError(
                f"--lr-mult: '{pattern}' matches {which}. Give whole parts of names, such as embedding, layers.0, *layernorm "
                f"or bias. The parameters of the first layer and of the rest of the model: {shown}"
            )
        left = rest


def rate_of(name: str, options: OptimizerConfig) -> Rate:
    """The rate of a parameter: the decoupled or the common one, times the factor of the first pattern that matches."""
    rate = Rate(options.lr, options.min_lr)
    if options.decoupled_lr is not None and name in DECOUPLED:
        floor = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
        rate = Rate(options.decoupled_lr, floor)
    factor = next((factor for pattern, factor in parse_factors(options.lr_mult) if matches(pattern, name)), 1.0)
    return Rate(rate.peak * factor, rate.floor * factor)


def has_own_rates(options: OptimizerConfig) -> bool:
    """Whether parameters differ in their learning rates."""
    return bool(options.lr_mult) or options.decoupled_lr is not None


def group_schedules(optimizer: "Optimizer", schedule: LearningRateSchedule) -> list[LearningRateSchedule]:
    """The schedule of each group of an optimizer that has not loaded a state yet. Where parameters have their own rates, groups
    carry `max_lr` and `min_lr`, as Megatron's do."""
    return [
        replace(schedule, peak=group.get("max_lr", schedule.peak), floor=group.get("min_lr", schedule.floor))
        for group in optimizer.param_groups
    ]


def set_rates(optimizer: "Optimizer", schedules: Sequence[LearningRateSchedule], consumed_samples: int) -> None:
    """Gives each group the learning rate of its schedule."""
    for group, schedule in zip(optimizer.param_groups, schedules, strict=True):
        group["lr"] = schedule.lr(consumed_samples)
        if "max_lr" in group:  # a checkpoint of other flags has others
            group["max_lr"], group["min_lr"] = schedule.peak, schedule.floor
