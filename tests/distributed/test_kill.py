"""A run that loses a rank goes on by itself and ends bit-identical to one that did not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import open_checkpoint
from holdfast.system.journal import read_journal
from tests.corpus import VOCABULARY, write_dataset
from tests.grids import mostly_slow

pytestmark = pytest.mark.distributed

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --split 90,10,0 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-warmup-iters 4 --eval-interval 0 --no-tensorboard --nproc-per-node 2 "
    "--hidden-dropout 0.1 --num-workers 1"
).split()


def command(prefix: Path, save: Path, steps: int, *more: str) -> list[str]:
    flags = [*FLAGS, "--vocab-size", str(VOCABULARY), "--data-path", str(prefix), "--save", str(save)]
    return [sys.executable, "-m", "holdfast.cli", "train", *flags, "--train-iters", str(steps), *more]


def train(prefix: Path, save: Path, steps: int, *more: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(prefix, save, steps, *more), capture_output=True, text=True, timeout=400)
    assert done.returncode == expect, done.stderr
    return done


def final_state(save: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(save) as checkpoint:
        return {name: np.array(checkpoint.tensor(name)) for name in checkpoint.tensors}


def assert_same_state(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys() and left
    for name in left:
        assert left[name].tobytes() == right[name].tobytes(), name


def ranks_of(save: Path) -> list[int]:
    """The processes that train into this folder, found by the configuration their command line names."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"holdfast.train" in words and f'save = "{save}"'.encode() in Path(words[-2].decode()).read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError, UnicodeDecodeError):
            continue
    return found


def wait_for_step(save: Path, step: int, process: subprocess.Popen[str], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(record["iteration"] >= step for record in read_journal(save / "metrics.jsonl")):
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def undisturbed(prefix, tmp_path_factory):
    save = tmp_path_factory.mktemp("clean") / "run"
    train(prefix, save, 60)
    return final_state(save)


def test_a_killed_rank_costs_at_most_one_step_and_changes_nothing(prefix, undisturbed, tmp_path):
    save = tmp_path / "run"
    process = subprocess.Popen(
        command(prefix, save, 60, "--max-restarts", "3"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_step(save, random.randint(5, 30), process)
        victims = ranks_of(save)
        assert len(victims) == 2, victims
        os.kill(random.choice(victims), signal.SIGKILL)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    events = list(read_journal(save / "events.jsonl"))
    failures = [event for event in events if event["event"] == "failure"]
    assert [event["cause"] for event in failures if event["kind"] == "exit"] == ["killed by SIGKILL"], failures
    resumed = [event for event in events if event["event"] == "resumed"]
    assert [event["source"] for event in resumed] == ["memory"] and resumed[0]["steps_lost"] <= 1, events
    assert_same_state(final_state(save), undisturbed)
    assert ranks_of(save) == []
    assert {record["iteration"] for record in read_journal(save / "metrics.jsonl")} == set(range(1, 61))
    notes = [line for line in stderr.splitlines() if "] iteration " not in line]
    assert "gloo" not in stderr and len(notes) <= 14, notes


@pytest.mark.parametrize(
    ("number", "code"),
    mostly_slow([(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130)], [(signal.SIGINT, 130)]),
)
def test_a_signal_puts_the_state_on_disk_and_the_next_start_goes_on(prefix, undisturbed, tmp_path, number, code):
    save = tmp_path / "run"
    process = subprocess.Popen(command(prefix, save, 60), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(save, 10, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    train(prefix, save, 60)
    assert_same_state(final_state(save), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("trigger", ["persist", "error.txt"])
def test_a_trigger_file_stops_the_run_once(prefix, undisturbed, tmp_path, trigger):
    save = tmp_path / "run"
    process = subprocess.Popen(command(prefix, save, 60), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(save, 10, process)
        (save / trigger).touch()
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert not (save / trigger).exists()
    with open_checkpoint(save) as checkpoint:
        assert 10 <= checkpoint.step < 60
    train(prefix, save, 60)
    assert_same_state(final_state(save), undisturbed)


@pytest.mark.slow
def test_a_run_continues_in_another_layout(prefix, tmp_path):
    """Ten steps on two data-parallel ranks, ten more with tensor parallelism: losses as uninterrupted."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(prefix, whole, 20, "--hidden-dropout", "0", "--lr-decay-style", "constant")
    train(prefix, halves, 10, "--hidden-dropout", "0", "--lr-decay-style", "constant")
    train(
        prefix, halves, 20, "--hidden-dropout", "0", "--lr-decay-style", "constant", "--tensor-model-parallel-size", "2"
    )
    expected = [record["loss"] for record in read_journal(whole / "metrics.jsonl")]
    found = [record["loss"] for record in read_journal(halves / "metrics.jsonl")]
    assert found == pytest.approx(expected, rel=1e-5)
