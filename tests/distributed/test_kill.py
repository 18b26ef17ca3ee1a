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
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.system.journal import read_journal
from tests.corpus import VOCABULARY, write_dataset
from tests.grids import mostly_slow
from tests.snapshot.harness import keeper_process

pytestmark = pytest.mark.distributed

# A step takes some 10 ms: after a step was seen, a busy machine must get to the kill before the run ends.
STEPS = 120
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
    """The live processes that train into this folder, from their status pages."""
    pages = RunMemory.of(save.name, save).pages().values()
    return [page["process"] for page in pages if page.owner_alive()]


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
    train(prefix, save, STEPS, "--no-fork-server")
    return final_state(save)


def test_a_killed_rank_costs_at_most_one_step_and_changes_nothing(prefix, undisturbed, tmp_path):
    save = tmp_path / "run"
    process = subprocess.Popen(
        command(prefix, save, STEPS, "--max-restarts", "3"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    assert {record["iteration"] for record in read_journal(save / "metrics.jsonl")} == set(range(1, STEPS + 1))
    notes = [line for line in stderr.splitlines() if "] iteration " not in line]
    assert "gloo" not in stderr and "fork" not in stderr and len(notes) <= 14, notes


OPTIONS = {
    "muon, rates by name": "--optimizer muon --data-parallel-sharding-strategy optim_grads_params "
    "--lr-mult embedding=0.1,layers.1=2 --decoupled-lr 3e-3",
    "muon, zero 2": "--optimizer muon --data-parallel-sharding-strategy optim_grads --lr-mult embedding=0.1",
    "gpt-neox, best-fit packing, z-loss": "--position-embedding-type rope --rotary-percent 0.5 --use-parallel-residual "
    "--pipeline-model-parallel-size 2 --packing best-fit --z-loss 1e-2",
    # a threshold so low that many steps after the twentieth are skipped
    "zero 1, best-fit packing, spike guard": "--data-parallel-sharding-strategy optim --packing best-fit --spike-guard 1e-6",
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_with_these_options_resumes_bit_identically(prefix, tmp_path, options):
    flags = OPTIONS[options].split()
    train(prefix, tmp_path / "clean", 60, *flags)
    save = tmp_path / "run"
    process = subprocess.Popen(
        command(prefix, save, 60, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(save, 10, process)
    os.kill(ranks_of(save)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert any(event["event"] == "resumed" for event in read_journal(save / "events.jsonl"))
    assert_same_state(final_state(save), final_state(tmp_path / "clean"))


@pytest.mark.parametrize(
    ("number", "code"),
    mostly_slow(
        [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)], [(signal.SIGHUP, 129)]
    ),
)
def test_a_signal_puts_the_state_on_disk_and_the_next_start_goes_on(prefix, undisturbed, tmp_path, number, code):
    save = tmp_path / "run"
    process = subprocess.Popen(command(prefix, save, STEPS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(save, 10, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    names = [event["event"] for event in read_journal(save / "events.jsonl")]
    assert "finished" in names and "failure" not in names
    train(prefix, save, STEPS)
    assert_same_state(final_state(save), undisturbed)


def test_a_stopped_run_ends_after_its_last_step_is_on_disk(prefix, tmp_path):
    """In a container, the keeper and the memory end with the supervisor. Here the keeper stands still, as with a slow disk."""
    save = tmp_path / "run"
    process = subprocess.Popen(
        command(prefix, save, 1_000_000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_step(save, 10, process)
        keeper = keeper_process(RunMemory.of(save.name, save))
        os.kill(keeper, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("until step" in line and "is on disk" in line for line in lines)
        os.kill(keeper, signal.SIGCONT)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    (end,) = [event for event in read_journal(save / "events.jsonl") if event["event"] == "finished"]
    assert end["step"] == checkpoints_in(save)[-1][0]


@pytest.mark.slow
@pytest.mark.parametrize("trigger", ["persist", "error.txt"])
def test_a_trigger_file_stops_the_run_once(prefix, undisturbed, tmp_path, trigger):
    save = tmp_path / "run"
    process = subprocess.Popen(command(prefix, save, STEPS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(save, 10, process)
        (save / trigger).touch()
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert not (save / trigger).exists()
    with open_checkpoint(save) as checkpoint:
        assert 10 <= checkpoint.step < STEPS
    train(prefix, save, STEPS)
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
