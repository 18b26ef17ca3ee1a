"""Resuming at another world size and layout, with another model, and from a snapshot that is set aside; rows 24, 29."""

from dataclasses import replace

import pytest

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.quarantine import Quarantine
from tests.grids import mostly_slow

from .harness import Fault, launch, nothing_left, run_to_the_end, wait_for

pytestmark = pytest.mark.distributed

CHANGES = [
    ("ddp", 4, "ddp", 2),
    ("ddp", 2, "ddp", 4),
    ("ddp", 4, "ddp", 3),
    ("ddp", 1, "ddp", 4),
    ("ddp", 2, "fsdp", 2),
    ("fsdp", 3, "ddp", 2),
    ("tp", 4, "ddp", 4),
]


@pytest.mark.parametrize(("layout", "world", "new_layout", "new_world"), mostly_slow(CHANGES, CHANGES[2:5:2]))
def test_memory_serves_another_world(run, oracle, layout, world, new_layout, new_world):
    run.layout, run.world = layout, world
    run.faults = [Fault("kill", rank=-1, step=6, point="committed")]
    assert not launch(run).wait(run)
    hashes = oracle(run)
    later = replace(run, layout=new_layout, world=new_world, steps=9, faults=[])
    assert run_to_the_end(later, restarts=0) == 0
    (resumed,) = later.events("resumed")
    assert resumed["source"] == "memory" and resumed["step"] >= 5
    restored = later.trace("restored")[-new_world:]
    assert {entry["hash"] for entry in restored} == {hashes[resumed["step"]]}
    assert restored[0]["seen"] == list(range(1, resumed["step"] + 1)), "the cursor comes along"
    wait_for(lambda: nothing_left(run.memory), "old and new memory to be freed")


def test_another_model_is_refused_by_name_and_memory_is_kept(run, check):
    run.faults = [Fault("kill", rank=-1, step=6, point="committed")]
    assert not launch(run).wait(run)
    wider = replace(run, width=24, faults=[])
    assert not launch(wider).wait(wider)
    refusals = [event["reason"] for event in run.events("refused")]
    assert any("0.weight" in reason and "[64, 16]" in reason and "[96, 24]" in reason for reason in refusals), refusals
    run.faults = []
    check(run)
    assert run.events("resumed")[0]["step"] >= 5


def test_a_state_that_leads_to_nan_twice_is_set_aside(run, check):
    run.save_every, run.pace = 3, 0.05
    run.faults = [
        Fault("kill", rank=-1, step=8, point="committed"),
        Fault("report_nan_and_die", rank=0, step=9, point="forward", attempts=(1, 2)),
    ]
    assert not launch(run).wait(run)
    first = wait_for(lambda: [e["step"] for e in run.events("persisted")], "a checkpoint")
    for attempt in (1, 2):
        assert not launch(run, attempt).wait(run)
    bad = [event["step"] for event in run.events("resumed")]
    assert len(bad) == 2 and min(bad) >= 7
    assert launch(run, 3).wait(run)
    resumed = run.events("resumed")[-1]
    assert resumed["source"] == "disk" and resumed["step"] < min(bad) and resumed["step"] in first
    assert [e for e in run.events("snapshot") if e["outcome"] == "set aside"]
    assert not [step for step, _ in checkpoints_in(run.folder) if min(bad) <= step < 9]


def test_a_single_nan_sets_nothing_aside(tmp_path):
    quarantine = Quarantine(tmp_path)
    quarantine.resumed_from(50)
    quarantine.count()
    assert quarantine.suspected() is None
    quarantine.resumed_from(500)
    quarantine.count()
    assert quarantine.suspected() is None, "far beyond the first: another matter"
    quarantine.resumed_from(501)
    quarantine.count()
    assert quarantine.suspected() == 500
    quarantine.resumed_from(400)
    assert quarantine.suspected() is None
