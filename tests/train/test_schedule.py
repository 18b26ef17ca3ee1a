"""Learning rates equal megatron-core's scheduler, and batches its ramp-up, step by step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.config import Config, OptimizerConfig, TrainConfig, read_config
from holdfast.system.errors import HoldfastError
from holdfast.train.command import parse
from holdfast.train.learning_rates import rate_of
from holdfast.train.schedule import LearningRateSchedule, batches_of, schedule_of

BATCH, STEPS = 4, 50


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("tail", ["linear", "cosine", "exponential", "minus_sqrt"])
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


def test_the_decoupled_rate_is_megatrons():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options = OptimizerConfig(lr=1.0, min_lr=0.1, decoupled_lr=0.02, decoupled_min_lr=0.001)
    names = {"decoder.final_layernorm.weight": (1.0, 0.1), "output_layer.weight": (0.02, 0.001)}
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in names], lr=0.0)
    for group, (peak, floor) in zip(optimizer.param_groups, names.values(), strict=True):
        group.update(lr_mult=1.0, wd_mult=1.0, max_lr=peak, min_lr=floor)
    oracle = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.1, lr_warmup_steps=5, lr_decay_steps=40, lr_decay_style="cosine",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=False,
    )  # fmt: skip
    rates = [rate_of(name, options) for name in names]
    ours = [LearningRateSchedule("cosine", rate.peak, rate.floor, 5, 40, 0, "linear", 1.0) for rate in rates]
    for step in range(45):
        found = [group["lr"] for group in optimizer.param_groups]
        assert [schedule.lr(step) for schedule in ours] == pytest.approx(found, rel=1e-12, abs=1e-15), step
        oracle.step(1)


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


@pytest.mark.parametrize(("ramp", "samples"), [((), 10), ((), 12), ((4, 4, 20), 50)])
def test_the_samples_of_all_steps_include_the_whole_last_batch(ramp, samples):
    config = replace(
        Config(), train=TrainConfig(train_samples=samples, global_batch_size=16 if ramp else 4, rampup_batch_size=ramp)
    )
    batches = batches_of(config, 1)
    steps = batches.iterations(None)
    consumed = [0]
    for _ in range(steps):
        consumed.append(consumed[-1] + batches.size(consumed[-1]))
    assert [batches.samples(step) for step in range(steps + 1)] == consumed
    assert consumed[-2] < samples <= consumed[-1] and batches.total_samples == samples


@pytest.mark.parametrize("ramp", [(4, 4, 0), (4, 0, 100), (0, 4, 100), (32, 4, 100), (3, 4, 100)])
def test_a_ramp_that_does_not_lead_to_the_batch_is_refused(ramp):
    config = replace(Config(), train=TrainConfig(train_iters=9, global_batch_size=16, rampup_batch_size=ramp))
    with pytest.raises(HoldfastError, match="rampup_batch_size"):
        batches_of(config, 1)


def test_wsd_without_the_length_of_its_decay_is_refused():
    config = replace(Config(), train=TrainConfig(train_iters=9), optimizer=OptimizerConfig(lr_decay_style="WSD"))
    with pytest.raises(HoldfastError, match="WSD needs lr_wsd_decay_iters"):
        schedule_of(config, batches_of(config, 1))


def test_a_length_given_as_a_flag_replaces_another_one_of_the_file():
    optimizer = parse(["bert_tiny", "--lr-warmup-iters", "5"]).config.optimizer
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == (5, None)
    train = parse(["gpt3_175b", "--train-iters", "9"]).config.train
    assert (train.train_iters, train.train_samples) == (9, None)
    both = parse(["bert_tiny", "--lr-warmup-iters", "5", "--lr-warmup-fraction", "0.2"]).config.optimizer
    assert (both.lr_warmup_iters, both.lr_warmup_fraction) == (5, 0.2)


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
