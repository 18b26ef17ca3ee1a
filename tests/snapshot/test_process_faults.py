"""Ranks that die or hang, in every way and at every point; rows 1-4, 11-16, 25 and 26 of the matrix of faults."""

import pytest

from holdfast.checkpoint.folder import checkpoints_in
from tests.snapshot.harness import Fault, run_to_the_end

pytestmark = pytest.mark.distributed


def test_an_undisturbed_run_leaves_its_last_step_on_disk_and_nothing_in_memory(run, check):
    assert check(run) == 0
    assert [e["event"] for e in run.events()] == ["started", "persisted", "finished"]
    assert [step for step, _ in checkpoints_in(run.folder)] == [run.steps]


@pytest.mark.parametrize("point", ["forward", "backward", "committed", "stepped", "taken"])
def test_one_rank_killed(run, check, point):
    run.faults = [Fault("kill", rank=1, step=5, point=point)]
    assert check(run) == 1
    (resumed,) = run.events("resumed")
    assert resumed["step"] >= 4
    assert [e["rank"] for e in run.events("failure")][:1] in ([1], [0])


@pytest.mark.parametrize("nodes", [1, 2])
def test_memory_that_is_removed_under_a_run_is_made_again(run, check, nodes):
    """By a clean-up after another job of this user, or at the end of a login."""
    run.nodes, run.steps, run.save_every = nodes, 14, 5
    run.faults = [
        Fault("remove_memory", rank=1, step=5, point="saved"),
        Fault("kill", rank=0, step=11, point="taken"),
    ]
    assert check(run) == 1
    assert any(event["outcome"] == "lost" for event in run.events("snapshot"))
    (resumed,) = run.events("resumed")
    assert resumed["source"] in ("memory", "mixed") and resumed["step"] >= 9
    assert {10, run.steps} <= {step for step, _ in checkpoints_in(run.folder)}


def test_one_rank_killed_while_its_slot_is_being_written(run, check):
    run.slow_copy = {1: 0.3}
    run.faults = [Fault("kill while writing", rank=1, step=5, point="taken")]
    assert check(run) == 1
    assert run.events("resumed")[0]["step"] == 4


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_step_that_one_rank_alone_has_done_is_not_counted_as_lost(run, check, nodes):
    """Rank 1 dies in the backward pass of step 6, with half of step 5 copied; rank 0 alone ends step 6. The node of rank 0 holds
    all tensors of step 5, but not the random generators of rank 1."""
    run.slow_copy, run.steps, run.nodes = {1: 1.0}, 7, nodes
    run.faults = [Fault("kill", rank=1, step=5, point="backward")]
    assert check(run) == 1
    (resumed,) = run.events("resumed")
    assert (resumed["step"], resumed["steps_lost"]) == (4, 1)


def test_one_rank_killed_between_the_payload_and_the_ready_store(run, check):
    run.faults = [Fault("kill before ready", rank=1, step=5, point="stepped")]
    assert check(run) == 1
    assert run.events("resumed")[0]["step"] == 4


def test_all_ranks_killed_at_once(run, check):
    run.faults = [Fault("kill", rank=-1, step=6, point="committed")]
    assert check(run) == 1


@pytest.mark.parametrize("how", ["segfault", "abort"])
def test_a_rank_that_crashes(run, check, how):
    run.faults = [Fault(how, rank=0, step=5, point="forward")]
    assert check(run) == 1


@pytest.mark.parametrize(
    ("how", "cause"), [("raise", "injected: the forward pass failed"), ("out of memory", "MemoryError")]
)
def test_an_exception_is_reported_with_its_cause_and_the_state_persisted(run, check, how, cause):
    run.faults = [Fault(how, rank=1, step=5, point="forward")]
    assert check(run) == 1
    failures = run.events("failure")
    assert any(failure["rank"] == 1 and cause in failure["cause"] for failure in failures), failures
    assert [e["step"] for e in run.events("persisted")] and run.events("persisted")[0]["reason"] == "died"


@pytest.mark.parametrize("how", ["stop", "hold the interpreter"])
def test_a_hung_rank_is_detected_reported_and_killed(run, check, how):
    run.options = {"hang_seconds": 8.0, "kill_hung": True}
    run.faults = [Fault(how, rank=1, step=5, point="forward")]
    assert check(run) == 1
    hung = [failure for failure in run.events("failure") if failure["kind"] == "hung"]
    assert hung and set(hung[0]["ranks"]) == {"0", "1"}
    assert any(persisted["reason"] in ("hung", "died") for persisted in run.events("persisted"))
    assert "train" in (run.folder / "stacks" / "rank-00000.txt").read_text(), "the stack of the live rank"


def test_an_exception_in_the_copy_costs_one_snapshot_and_is_counted(run, check):
    run.faults = [Fault("break the next copy", rank=0, step=5, point="stepped")]
    assert check(run) == 0
    (lost,) = run.events("snapshot")
    assert (lost["step"], lost["outcome"]) == (5, "discarded") and "injected" in lost["reason"]
    assert sorted(end["skipped"] for end in run.trace("ended")) == [0, 1]


def test_a_crash_after_a_lost_snapshot_finds_the_step_before(run, check):
    run.faults = [
        Fault("break the next copy", rank=1, step=5, point="stepped"),
        Fault("kill", rank=0, step=5, point="backward"),
    ]
    assert check(run, lost=2) == 1
    assert run.events("resumed")[0]["step"] == 4


def test_weights_changed_during_the_copy_are_noticed(run, check):
    run.slow_copy = {0: 0.2}
    run.faults = [Fault("mutate", rank=0, step=5, point="taken")]
    assert check(run) == 0
    (lost,) = run.events("snapshot")
    assert (lost["step"], lost["outcome"]) == (5, "discarded") and "changed during the copy" in lost["reason"]


def test_a_loop_without_commit_is_refused_with_the_fix_on_every_start(run):
    run.commit = False
    with pytest.raises(AssertionError, match="the run failed 2 times"):
        run_to_the_end(run, restarts=1)
    causes = [event["cause"] for event in run.events("failure")]
    assert any("snapshots.commit() after backward() and before optimizer.step()" in cause for cause in causes)


def test_ranks_one_step_apart_have_a_common_step(run, check):
    run.slow_copy = {1: 0.5}
    run.faults = [Fault("kill while writing", rank=1, step=7, point="taken")]
    assert check(run) == 1
    assert run.events("resumed")[0]["step"] == 6


def test_a_second_crash_during_the_resume(run, check):
    run.faults = [Fault("kill", rank=1, step=5), Fault("kill", rank=0, step=0, point="restoring", attempts=(1,))]
    assert check(run) == 2
    assert run.events("resumed")[0]["step"] == 4


def test_five_crashes_in_a_row_make_progress(run, check):
    run.faults = [Fault("kill", rank=i % 2, step=3 + i, point="forward", attempts=(i,)) for i in range(5)]
    assert check(run, restarts=5) == 5
    steps = [event["step"] for event in run.events("resumed")]
    assert steps == sorted(steps) and len(steps) == 5


def test_a_crash_before_the_first_snapshot_is_a_clean_start(run, check):
    run.faults = [Fault("kill", rank=1, step=0, point="forward")]
    assert check(run) == 1
    assert run.events("resumed") == []


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_sharded_states_resume_as_well(run, check, layout):
    run.layout = layout
    run.faults = [Fault("kill", rank=1, step=5, point="forward")]
    assert check(run) == 1


def test_a_single_process_needs_no_process_group(run, check):
    run.world = 1
    run.faults = [Fault("kill", rank=0, step=5)]
    assert check(run) == 1
