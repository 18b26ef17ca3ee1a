"""Learning rate and batch size as pure functions of the consumed samples, with Megatron's meaning of each style.

Progress is counted in samples, so that a batch size ramp-up does not change the learning rate curve.
"""

import math
from dataclasses import dataclass, replace

from holdfast.config import Config
from holdfast.system.errors import HoldfastError


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up and decay of the learning rate. All lengths are in samples."""

    style: str
    peak: float
    floor: float
    warmup: float
    decay: float
    wsd_decay: float
    wsd_style: str
    power: float

    def lr(self, consumed: int) -> float:
        """The learning rate of the step that starts after `consumed` samples."""
        if self.warmup > 0 and consumed <= self.warmup:
            return self.peak * consumed / self.warmup
        if self.style == "constant":
            return self.peak
        if consumed > self.decay:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(consumed, 1)))
        ratio = (consumed - self.warmup) / max(self.decay - self.warmup, 1)
        return self.floor + self._remaining(ratio, consumed) * (self.peak - self.floor)

    def _remaining(self, ratio: float, consumed: int) -> float:
        """The fraction of peak - floor that is left at `ratio` of the decay."""
        if self.style == "linear":
            return 1.0 - ratio
        if self.style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.style == "polynomial":  # as in NVIDIA's BERT recipe: over the whole run, warm-up included
            return float((1.0 - consumed / self.decay) ** self.power)
        start = self.decay - self.wsd_decay
        if consumed <= start:
            return 1.0
        late = (consumed - start) / max(self.wsd_decay, 1)
        if self.wsd_style == "linear":
            return 1.0 - late
        if self.wsd_style == "cosine":
            return 0.5 * (math.cos(math.pi * late) + 1.0)
        if self.wsd_style == "minus_sqrt":
            return 1.0 - math.sqrt(late)
        return float(2.0 * 0.5**late - 1.0)


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Samples of each step and of the whole run."""

    full: int
    start: int
    increment: int
    ramp_samples: int
    total_samples: int

    def size(self, consumed: int) -> int:
        """The global batch of the step that starts after `consumed` samples."""
        if self.increment == 0 or consumed > self.ramp_samples:
            return self.full
        steps = (self.full - self.start) // self.increment
        per_step = self.ramp_samples / max(steps, 1)
        return min(self.full, self.start + int(consumed / per_step) * self.increment)

    def samples(self, steps: int) -> int:
        """Samples of the first `steps` steps."""
        consumed = 0
        for step in range(steps):
            if self.increment == 0 or consumed > self.ramp_samples:
                return consumed + (steps - step) * self.full
            consumed += self.size(consumed)
        return consumed

    def iterations(self, limit: int | None) -> int:
        """Steps until the run's samples are consumed, or `limit` if the run is given in steps."""
        if limit is not None:
            return limit
        consumed = steps = 0
        while consumed < self.total_samples:
            if consumed > self.ramp_samples or self.increment == 0:
                return steps + -(-(self.total_samples - consumed) // self.full)
            consumed += self.size(consumed)
            steps += 1
        return steps


def batches_of(config: Config, data_parallel: int) -> BatchSizeSchedule:
    """The batch sizes of a run on `data_parallel` data-parallel ranks."""
    train = config.train
    if (train.train_iters is None) == (train.train_samples is None):
        raise HoldfastError("give the length of the run: either train_iters or train_samples")
    full = train.global_batch_size or train.micro_batch_size * data_parallel
    start, increment, ramp = train.rampup_batch_size or (full, 0, 0)
    if train.rampup_batch_size and 0 in train.rampup_batch_size:
        raise HoldfastError("rampup_batch_size START INCREMENT SAMPLES: all three must be above 0; leave it unset")
    if start > full or (increment and (full - start) % increment):
        raise HoldfastError(f"rampup_batch_size: {start} does not reach {full} in steps of {increment}")
    plan = BatchSizeSchedule(full, start, increment, ramp, train.train_samples or 0)
    return plan if train.train_iters is None else replace(plan, total_samples=plan.samples(train.train_iters))


def schedule_of(config: Config, batches: BatchSizeSchedule) -> LearningRateSchedule:
    """The learning rate schedule of a run; raises if its warm-up is not shorter than its decay, or WSD has no length."""
    options, full = config.optimizer, batches.full
    if options.lr_decay_style == "WSD" and not options.lr_wsd_decay_iters:
        raise HoldfastError("lr_decay_style WSD needs lr_wsd_decay_iters, the steps of its final decay")
    if config.train.train_samples is not None:
        decay = options.lr_decay_samples or batches.total_samples
        warmup: float = options.lr_warmup_samples or options.lr_warmup_iters * full
    else:
        decay = options.lr_decay_iters * full if options.lr_decay_iters else batches.total_samples
        warmup = options.lr_warmup_iters * full
    if options.lr_warmup_fraction is not None:
        warmup = options.lr_warmup_fraction * decay
    if warmup >= decay and options.lr_decay_style not in ("constant", "inverse-square-root"):
        raise HoldfastError(_warmup_problem(config, warmup, decay, full))
    wsd = (options.lr_wsd_decay_iters or 0) * full
    return LearningRateSchedule(
        options.lr_decay_style,
        options.lr,
        options.min_lr,
        warmup,
        decay,
        wsd,
        options.lr_wsd_decay_style,
        options.lr_poly_power,
    )


def _warmup_problem(config: Config, warmup: float, decay: float, batch: int) -> str:
    """Names the key that set the warm-up, the key that set the decay, and the flag to change."""
    options, train = config.optimizer, config.train
    in_samples = train.train_samples is not None
    if options.lr_warmup_fraction is not None:
        key, value, limit = "lr_warmup_fraction", options.lr_warmup_fraction, "1"
    elif in_samples and options.lr_warmup_samples:
        key, value, limit = "lr_warmup_samples", options.lr_warmup_samples, f"{decay:.0f}"
    else:
        key, value, limit = "lr_warmup_iters", options.lr_warmup_iters, f"{math.ceil(decay / batch)}"
    unit = "samples" if in_samples else "iters"
    decay_key = f"lr_decay_{unit}" if getattr(options, f"lr_decay_{unit}") else f"train_{unit}"
    decay_value = getattr(options if decay_key.startswith("lr") else train, decay_key)
    return (
        f"the warm-up, {key} = {value} ({warmup:.0f} samples), is not shorter than the decay, {decay_key} = {decay_value} "
        f"({decay:.0f} samples): set --{key.replace('_', '-')} below {limit}"
    )
