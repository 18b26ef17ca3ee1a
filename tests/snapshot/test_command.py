"""The verbs `snapshots`, `persist` and `inspect` on a run that trains, one that died, and one that is only on disk."""

import contextlib
import json
import subprocess
import sys

import pytest

from holdfast import cli
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.ready_slot import OvertakenError, find_ready
from holdfast.snapshot.memory.slot import NOTHING, DamagedError
from tests.snapshot.harness import Fault, launch, nothing_left, wait_for

pytestmark = pytest.mark.distributed


@pytest.fixture
def holdfast(capsys):
    """The program, in this process: a subprocess per call would be most of the time."""

    def call(*arguments):
        capsys.readouterr()
        cli.run(arguments)
        return capsys.readouterr().out

    return call


def test_persist_with_and_without_live_trainers(run, memory, holdfast):
    run.steps, run.pace = 5000, 0.02
    where = ["--snapshot-dir", str(memory)]
    launched = launch(run)
    wait_for(lambda: run.trace("restored") and list(memory.rglob("*.arena")), "a snapshot")
    path = holdfast("persist", str(run.folder), *where).strip()
    assert path == str(checkpoints_in(run.folder)[-1][1])
    assert "the run is training" in holdfast("snapshots", run.name, *where)
    facts = json.loads(holdfast("snapshots", run.name, *where, "--json", "--verify"))
    assert facts["keeper"] and [rank["alive"] for rank in facts["ranks"]] == [True, True]
    assert len(facts["arenas"]) == 2 and facts["common_steps"]
    assert facts["checkpoints"][0]["trouble"] is None and facts["checkpoints"][0]["verified"]
    launched.kill()
    launched.wait(run)
    output = holdfast("snapshots", run.name, *where)
    assert "gone" in output and "in memory" in output
    assert all(
        len(line) <= 80 for line in output.splitlines() if str(memory) not in line and str(run.folder) not in line
    )
    holdfast("persist", run.name, *where)
    (arena, _) = sorted(memory.rglob("*.arena"))
    shown = json.loads(holdfast("inspect", str(arena), "--json"))
    assert "verified" in json.dumps(shown)
    launched = launch(run, 1)
    wait_for(lambda: len(run.trace("restored")) == 4, "the ranks to be back")
    holdfast("persist", run.name, "--stop", *where)
    assert launched.wait(run)
    wait_for(lambda: nothing_left(memory), "the memory to be freed")
    assert "this host holds nothing of this run" in holdfast("inspect", str(run.folder))
    output = holdfast("snapshots", str(run.folder), *where)
    assert "this host holds nothing of this run" in output and "on disk" in output


def test_persist_waits_for_the_first_snapshot_of_a_run_that_trains(run, memory, holdfast):
    run.slow_copy, run.steps = {1: 2.0}, 3
    launched = launch(run)
    wait_for(lambda: len(list(memory.rglob("*.arena"))) == 2, "the arenas")
    path = holdfast("persist", str(run.folder), "--snapshot-dir", str(memory)).strip()
    assert path == str(checkpoints_in(run.folder)[0][1])
    assert launched.wait(run)


def test_a_slot_that_is_used_again_while_it_is_verified_is_not_called_damaged(run, memory):
    run.faults = [Fault("kill", rank=-1, step=4)]
    launch(run).wait(run)
    with contextlib.closing(Arena(min(memory.rglob("*.arena")))) as arena:
        (step, _) = sorted(arena.ready_steps(), reverse=True)
        held = find_ready(arena, step)
        held.verify()
        held.slot.payload[held.slot.layout(held.header).starts[0]] ^= 1  # a trainer copies the next step into it ...
        with pytest.raises(DamagedError):
            held.verify()
        held.slot.store(NOTHING)  # ... after it has stored that in the header
        with pytest.raises(OvertakenError):
            held.verify()


def test_the_error_for_an_unknown_run_lists_the_runs_in_memory(run, memory):
    run.faults = [Fault("kill", rank=-1, step=4)]
    launch(run).wait(run)
    answer = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "persist", "unknown-run", "--snapshot-dir", str(memory)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 1
    assert "unknown-run" in answer.stderr and run.name in answer.stderr and "Traceback" not in answer.stderr
