"""Snapshots that make a device wait become rarer: after the same step on all ranks, and reported."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from holdfast.snapshot import Snapshots
from holdfast.snapshot.interval import WINDOW, SnapshotInterval
from tests.gloo import spawn_ranks

LATE = 3600.0


def test_the_interval_grows_only_after_a_window_of_long_waits():
    interval = SnapshotInterval(1, max_slowdown=0.02)
    for _ in range(WINDOW - 1):
        interval.record(LATE)
        assert interval.wanted() == 1
    interval.record(LATE)
    assert interval.wanted() == 2


def test_a_few_long_waits_are_not_enough():
    interval = SnapshotInterval(3, max_slowdown=0.02)
    for number in range(WINDOW):  # the first copy into each slot registers its memory
        interval.record(LATE if number < 3 else 0.0)
    assert interval.wanted() == 3


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 1 << 60, "max_slowdown": 0.02}])
def test_without_a_limit_or_without_snapshots_nothing_is_adapted(options):
    interval = SnapshotInterval(**options)
    for _ in range(WINDOW):
        interval.record(LATE)
    assert not interval.adapts and interval.wanted() == options["steps"]


def _train(folder, memory):
    """The copies of rank 1 are late; the steps after which each rank began a copy."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    snapshots = Snapshots("late", model, folder=folder, memory=memory, max_slowdown=0.02)
    snapshots.restore()
    begun = []
    for step in range(1, 41):
        snapshots.commit()
        dist.barrier()
        with torch.no_grad():
            model.weight.fill_(step)
        if dist.get_rank() == 1 and step < 25:
            snapshots.interval.record(LATE)
        snapshots.take(step)
        if snapshots._copy is not None:
            begun.append(step)
    snapshots.close()
    return begun, snapshots.interval.steps


@pytest.mark.distributed
def test_ranks_lengthen_the_interval_together(tmp_path, memory):
    first, second = spawn_ranks(2, _train, tmp_path, memory)
    assert first == second
    begun, interval = first
    assert interval >= 2 and begun[-1] == 40 - 40 % interval and begun[-2] == begun[-1] - interval
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    reported = [event["outcome"] for event in events if event["event"] == "snapshot"]
    assert reported == [f"every {steps} steps from here on" for steps in range(2, interval + 1)]


def _crash(folder, memory, restarts, late_steps):
    """Rank 1 has late copies; all ranks end as a crash does. The interval that they have then."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    dist.init_process_group("gloo")
    snapshots = Snapshots("late", torch.nn.Linear(8, 8), folder=folder, memory=memory, max_slowdown=0.02)
    first = snapshots.restore() + 1
    for step in range(first, first + max(late_steps, 4)):
        snapshots.commit()
        dist.barrier()
        if dist.get_rank() == 1 and late_steps:
            snapshots.interval.record(LATE)
        snapshots.take(step)
    snapshots.finish_copy()
    return snapshots.interval.steps


@pytest.mark.distributed
def test_ranks_that_replace_failed_ones_keep_the_interval(tmp_path, memory):
    lengthened = spawn_ranks(2, _crash, tmp_path, memory, 0, 40)
    assert lengthened[0] == lengthened[1] > 2
    assert spawn_ranks(2, _crash, tmp_path, memory, 1, 0) == lengthened
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kept = [event for event in events if event["event"] == "snapshot"][-1]
    assert kept["outcome"] == f"every {lengthened[0]} steps from here on" and kept["reason"] == "as before the failure"
    assert spawn_ranks(2, _crash, tmp_path, memory, 0, 0) == [1, 1]  # a start by hand begins with what it is given
