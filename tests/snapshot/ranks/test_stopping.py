"""Orderly ends: signals of the scheduler, at any time, to one rank or all, under a real torchrun; rows 8-10 of the matrix."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.system.journal import read_journal
from tests.snapshot.harness import Fault, launch, nothing_left, wait_for

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).parents[1] / "script.py"


def assert_stopped_together(run, oracle):
    ends = run.trace("ended")[-run.world :]
    assert len({(end["step"], end["hash"]) for end in ends}) == 1, ends
    step = ends[0]["step"]
    assert step < run.steps
    assert ends[0]["hash"] == oracle(run)[step]
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")
    assert [s for s, _ in checkpoints_in(run.folder)][-1] == step, "the last step is on disk"


@pytest.mark.parametrize(("point", "step"), [("forward", 0), ("forward", 7), ("committed", 7), ("taken", 7)])
def test_sigterm_ends_the_run_after_a_whole_step(run, check, oracle, point, step):
    run.steps = 50
    run.faults = [Fault("terminate", rank=-1, step=step, point=point)]
    assert launch(run).wait(run)
    assert_stopped_together(run, oracle)
    run.faults, run.steps = [], 30
    check(run, lost=2, sources=("disk",))


def test_sigusr1_to_one_rank_stops_all_after_the_same_step(run, oracle):
    run.steps = 50
    run.world = 3
    run.faults = [Fault("usr1", rank=2, step=6, point="backward")]
    assert launch(run).wait(run)
    assert_stopped_together(run, oracle)
    assert run.events("finished")[0]["stopped"] is True


def torchrun(run, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1",
         "--standalone", str(SCRIPT), str(run.folder), str(run.memory), *arguments],
        # torchrun's store outlives a restart, and with it dead ranks' addresses: docs/snapshots.md
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_sigterm_to_torchrun_persists_the_last_step_with_loader_workers(run):
    process = torchrun(run, "100000", "0")
    wait_for(lambda: len(lines(run, "step")) > 8, "some steps")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    # torchrun signals the loader's workers as well: the loop then ends by the loader's error, or in order
    reached = max(line["step"] for line in lines(run, "step"))
    wait_for(lambda: checkpoints_in(run.folder), "the keeper to write what is in memory")
    assert checkpoints_in(run.folder)[-1][0] >= reached - 1


@pytest.mark.slow
def test_plain_torchrun_resumes_from_memory_by_itself(run):
    process = torchrun(run, "20", "9")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (resumed,) = [e for e in read_journal(run.folder / "events.jsonl") if e["event"] == "resumed"]
    assert resumed["source"] == "memory" and resumed["steps_lost"] <= 1
    killed = {end["hash"] for end in lines(run, "ended")}
    undisturbed = run.folder.parent / "undisturbed"
    run.folder = undisturbed
    process = torchrun(run, "20", "0")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert killed == {end["hash"] for end in lines(run, "ended")}, "bit-identical to the run that was not killed"
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")


def lines(run, event):
    return [e for e in read_journal(run.folder / "trace.jsonl") if e["event"] == event]
