"""Every numeric key has a range, and what is out of it is refused before any rank starts."""

import dataclasses
import re
from typing import get_type_hints

import pytest

from holdfast.config import Config, OptimizerConfig, ParallelConfig, TrainConfig, config_keys
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.checks.bounds import BOUNDS, check_bounds
from holdfast.train.schedule import batches_of, schedule_of


def test_every_numeric_key_has_one_range():
    sections = get_type_hints(Config)
    numeric = set()
    for section, keys in config_keys().items():
        hints = get_type_hints(sections[section])
        numeric |= {key for key in keys if re.search(r"\b(int|float)\b", str(hints[key]))}
    assert numeric == set(BOUNDS)


def test_the_defaults_are_in_range():
    check_bounds(Config())


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("optimizer", {"lr": -1.0}, "--lr -1 must be at least 0"),
        ("optimizer", {"lr": float("nan")}, "--lr nan must be at least 0"),
        ("optimizer", {"adam_beta2": 1.0}, "--adam-beta2 1 must be at least 0 and below 1"),
        ("optimizer", {"lr": 1e-4, "min_lr": 1e-3}, "--min-lr 0.001 must not exceed --lr 0.0001"),
        ("parallel", {"nproc_per_node": 0}, "--nproc-per-node 0 must be at least 1"),
        ("parallel", {"nnodes": 2, "node_rank": 2}, "--node-rank 2 must be below --nnodes 2"),
        ("train", {"seed": 2**32}, "--seed 4294967296 must be between 0 and 4294967295"),
        ("train", {"seed": 10**400}, "must be between 0 and 4294967295"),
        ("train", {"rampup_batch_size": (8, -8, 100)}, "--rampup-batch-size -8 must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag(section, changes, message):
    config = Config()
    config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
    with pytest.raises(UsageError, match=re.escape(message)):
        check_bounds(config)


def test_all_values_out_of_range_are_named_at_once():
    config = Config(optimizer=OptimizerConfig(lr=-1.0), parallel=ParallelConfig(nproc_per_node=0))
    with pytest.raises(UsageError, match="--lr .*; --nproc-per-node "):
        check_bounds(config)


@pytest.mark.parametrize(
    ("train", "options", "words"),
    [
        (
            {"train_iters": 5},
            {"lr_warmup_iters": 10},
            "lr_warmup_iters = 10 (80 samples), is not shorter than the decay, train_iters = 5 (40 samples): set "
            "--lr-warmup-iters below 5",
        ),
        (
            {"train_samples": 100},
            {"lr_warmup_samples": 60, "lr_decay_samples": 50},
            "lr_warmup_samples = 60 (60 samples), is not shorter than the decay, lr_decay_samples = 50 (50 samples): set "
            "--lr-warmup-samples below 50",
        ),
        ({"train_iters": 5}, {"lr_warmup_fraction": 1.0}, "lr_warmup_fraction = 1.0"),
    ],
)
def test_a_warm_up_longer_than_the_decay_names_both_keys_and_the_flag(train, options, words):
    config = Config(train=TrainConfig(global_batch_size=8, **train), optimizer=OptimizerConfig(**options))
    with pytest.raises(HoldfastError, match=re.escape(words)):
        schedule_of(config, batches_of(config, 1))
