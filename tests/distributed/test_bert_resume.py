"""A whole BERT run: four ranks, stopped by `error.txt`, continued with four, two or three, with one rank killed.

LAMB, fp16 with its loss scale: what the run's end depends on is all in what it left behind.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import open_checkpoint
from holdfast.system.journal import read_journal
from tests.corpus import write_sentences
from tests.distributed.test_kill import assert_same_state, final_state, ranks_of, wait_for_step

# Seven starts of up to four ranks, each of which imports torch.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]

PRESET = Path(__file__).parents[2] / "configs" / "bert_tiny.toml"
STEPS = 20
FLAGS = (
    f"--seq-length 32 --num-layers 1 --micro-batch-size 2 --global-batch-size 24 --train-iters {STEPS} --fp16 "
    "--initial-loss-scale 4096 --loss-scale-window 8 --eval-interval 0 --save-interval 1000 --no-tensorboard"
).split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("sentences"), documents=10)


def command(corpus: tuple[Path, Path], save: Path, ranks: int, *more: str) -> list[str]:
    vocab, prefix = corpus
    data = ["--vocab-file", str(vocab), "--data-path", str(prefix), "--save", str(save)]
    ranks_flag = ["--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "holdfast.cli", "train", str(PRESET), *FLAGS, *data, *ranks_flag, *more]


def train(*arguments: object) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


def stop_by_file(corpus: tuple[Path, Path], save: Path, *more: str) -> int:
    """Trains with four ranks until `error.txt` appears; the step that is on disk then."""
    process = subprocess.Popen(command(corpus, save, 4, *more), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(save, 5, process)
        (save / "error.txt").touch()
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert not (save / "error.txt").exists()
    with open_checkpoint(save) as checkpoint:
        assert 5 <= checkpoint.step < STEPS
        return checkpoint.step


def losses(save: Path) -> dict[int, tuple[float, float]]:
    return {r["iteration"]: (r["mlm_loss"], r["nsp_loss"]) for r in read_journal(save / "metrics.jsonl")}


def train_and_kill_a_rank(corpus: tuple[Path, Path], save: Path, after: int, *more: str) -> None:
    process = subprocess.Popen(command(corpus, save, 4, *more), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(save, after, process)
        victims = ranks_of(save)
        assert len(victims) == 4, victims
        os.kill(random.choice(victims), signal.SIGKILL)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    resumed = [event for event in read_journal(save / "events.jsonl") if event["event"] == "resumed"]
    assert resumed[-1]["source"] == "memory" and resumed[-1]["steps_lost"] <= 1


def test_stopped_by_error_txt_the_run_goes_on_with_four_two_or_three_ranks(corpus, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(corpus, whole, 4)
    step = stop_by_file(corpus, stopped)
    for ranks in (2, 3):  # a copy elsewhere: nothing of it is in memory
        shutil.copytree(stopped, tmp_path / f"on-{ranks}")
        train(corpus, tmp_path / f"on-{ranks}", ranks)
        assert_close(losses(tmp_path / f"on-{ranks}"), losses(whole))
    train_and_kill_a_rank(corpus, stopped, step + 2)
    logged, expected = losses(stopped), losses(whole)
    assert logged == {step: expected[step] for step in logged} and STEPS in logged
    assert len(logged) >= STEPS - 1  # without the step that was done but not logged when the rank was killed
    assert_same_state(final_state(stopped), final_state(whole))


def assert_close(found: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]) -> None:
    assert found.keys() == expected.keys()
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=2e-3), step
