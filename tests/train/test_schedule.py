"""Learning rates equal megatron-core's scheduler, and batches its ramp-up, step by step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.config import Config, OptimizerConfig, TrainConfig, read_config
from holdfast.system.errors import HoldfastError
from holdfast.train.schedule import batches_of, schedule_of

BATCH, STEPS = 4, 50


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("tail", ["linear", "cosine", "exponential"])
def test_the_learning_rate_is_megatrons(style, warmup, tail):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options = OptimizerConfig(
        lr=3e-3, min_lr=1e-4, lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=40, lr_wsd_decay_iters=11,
        lr_wsd_decay_style=tail,
    )  # fmt: skip
    config = replace(Config(), optimizer=options, train=TrainConfig(train_iters=STEPS, global_batch_size=BATCH))
    schedule = schedule_of(config, batches_of(config, 1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for group in optimizer.param_groups:
        group.update(lr_mult=1.0, wd_mult=1.0, max_lr=options.lr, min_lr=options.min_lr)
    oracle = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=options.lr, min_lr=options.min_lr, lr_warmup_steps=warmup * BATCH,
        lr_decay_steps=40 * BATCH, lr_decay_style=style, start_wd=0.0, end_wd=0.0, wd_incr_steps=1,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=False,
        wsd_decay_steps=11 * BATCH, lr_wsd_decay_style=tail,
    )  # fmt: skip
    for step in range(STEPS):
        assert schedule.lr(step * BATCH) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15), step
        oracle.step(BATCH)


def test_the_batch_grows_as_megatrons_does():
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    config = replace(
        Config(), train=TrainConfig(train_samples=500, global_batch_size=32, rampup_batch_size=(8, 8, 100))
    )
    batches = batches_of(config, 1)
    oracle = RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=32, micro_batch_size=1, data_parallel_size=1, decrease_batch_size_if_needed=False, rank=0,
        start_global_batch_size=8, batch_size_increment=8, ramup_samples=100,
    )  # fmt: skip
    consumed = 0
    for _ in range(30):
        oracle.update(consumed, True)
        assert batches.size(consumed) == oracle.get_current_global_batch_size(), consumed
        consumed += batches.size(consumed)


def test_steps_and_samples_of_a_run_agree():
    by_samples = replace(
        Config(), train=TrainConfig(train_samples=300, global_batch_size=16, rampup_batch_size=(4, 4, 60))
    )
    batches = batches_of(by_samples, 1)
    steps = batches.iterations(None)
    consumed, count = 0, 0
    while consumed < 300:
        consumed += batches.size(consumed)
        count += 1
    assert steps == count
    by_steps = replace(by_samples, train=replace(by_samples.train, train_samples=None, train_iters=steps))
    assert batches_of(by_steps, 1).total_samples == consumed


def test_a_run_without_length_or_with_two_is_refused():
    for train in (TrainConfig(), TrainConfig(train_iters=1, train_samples=1)):
        with pytest.raises(HoldfastError, match="train_iters or train_samples"):
            batches_of(replace(Config(), train=train), 1)
    long_warmup = replace(Config(), train=TrainConfig(train_iters=10), optimizer=OptimizerConfig(lr_warmup_iters=10))
    with pytest.raises(HoldfastError, match="not shorter than the decay"):
        schedule_of(long_warmup, batches_of(long_warmup, 1))


def test_polynomial_decay_is_that_of_nvidias_bert_recipe():
    """After the warm-up, lr × (1 - progress) ** power with the progress of the whole run; the peak is never reached twice."""
    base = read_config(Path(__file__).parents[2] / "configs" / "bert_large_phase1.toml")
    batches = batches_of(base, 8)
    schedule, batch = schedule_of(base, batches), batches.full
    warmup = 0.2843 * 7038
    for step in (0, 1, 700, 2000, 2001, 5000, 7037):
        progress = step / 7038
        expected = 6e-3 * (step / warmup if step < warmup else (1 - progress) ** 0.5)
        assert schedule.lr(step * batch) == pytest.approx(expected, rel=1e-12)
