"""fp16: an overflow on one rank is a step skipped by all, the scale follows Megatron's rule, a resume has it to the bit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.checkpoint import open_checkpoint
from holdfast.config import Config, ParallelConfig
from holdfast.system.journal import read_journal
from holdfast.train.checks.preflight import resolve
from holdfast.train.optim import LossScale
from holdfast.train.step import ForwardBackward
from holdfast.train.worker import run_worker
from tests.corpus import write_sentences
from tests.distributed.test_bert_layouts import tiny_bert
from tests.gloo import spawn_ranks

pytestmark = pytest.mark.distributed

START = 2.0**12
OVERFLOWS = (3, 5, 6)
# After each step: whether it was skipped, and the scale. Two overflows are needed before the scale halves, the third halves it
# at once, and four good steps in a row double it and forgive the overflows.
EXPECTED = [
    (False, START), (False, START), (True, START), (False, START), (True, START / 2), (True, START / 4),
    (False, START / 4), (False, START / 4), (False, START / 4), (False, START / 2), (False, START / 2),
]  # fmt: skip


def train_with_overflows(config: Config, first_step: int) -> list[tuple[bool, dict[str, float]]]:
    """One rank. The second one computes the given steps with a scale that fp16 gradients cannot hold."""
    seen: list[tuple[bool, dict[str, float]]] = []
    update, gradients, steps = LossScale.update, ForwardBackward.gradients, itertools.count(first_step)

    def noted_update(self, overflow):
        update(self, overflow)
        seen.append((overflow, self.state_dict()))

    def overflowing_gradients(self, batch, scale):
        too_much = 2.0**40 if next(steps) in OVERFLOWS and dist.get_rank() == 1 else 1.0
        return gradients(self, batch, scale * too_much)

    LossScale.update, ForwardBackward.gradients = noted_update, overflowing_gradients
    run_worker(config)
    return seen


def train(config: Config, first_step: int = 1) -> list[list[tuple[bool, dict[str, float]]]]:
    config, _ = resolve(replace(config, parallel=ParallelConfig(nproc_per_node=2)), 2)
    return spawn_ranks(2, train_with_overflows, config, first_step)


def lasting(config: Config, save: Path, steps: int) -> Config:
    return replace(
        config,
        train=replace(config.train, train_iters=steps, save=str(save), fp16=True, eval_interval=0),
        optimizer=replace(
            config.optimizer, lr_decay_style="constant", lr_warmup_fraction=None, initial_loss_scale=START,
            loss_scale_window=4, hysteresis=2,
        ),
    )  # fmt: skip


def tensors(save: Path) -> dict[str, bytes]:
    with open_checkpoint(save) as checkpoint:
        return {name: checkpoint.tensor(name).tobytes() for name in checkpoint.tensors}


def test_an_overflow_skips_the_step_everywhere_and_a_resume_restores_the_scale(tmp_path):
    corpus = write_sentences(tmp_path / "data", documents=10)
    config = tiny_bert(corpus, tmp_path / "unused")
    whole, parts, steps = tmp_path / "whole", tmp_path / "parts", len(EXPECTED)
    first, second = train(lasting(config, whole, steps))
    assert first == second
    assert [(skipped, state["scale"]) for skipped, state in first] == EXPECTED
    records = list(read_journal(whole / "metrics.jsonl"))
    assert [record["skipped_iterations"] for record in records] == [0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    assert [record["loss_scale"] for record in records] == [START] + [scale for _, scale in EXPECTED[:-1]]

    # A stop between the second and the third overflow: scale, good steps and overflows left all have to come back.
    before = train(lasting(config, parts, 5))[0]
    after = train(lasting(config, parts, steps), first_step=6)[0]
    assert before + after == first
    assert tensors(parts) == tensors(whole)
