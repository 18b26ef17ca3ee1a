"""The shares of useful and lost time, on runs whose times are known."""

import pytest

from holdfast.report.goodput import goodput
from holdfast.report.run_record import read_run
from holdfast.system.journal import Journal
from tests.report.runs import record


def write(folder, events, records):
    folder.mkdir(exist_ok=True)
    for name, entries in (("events.jsonl", events), ("metrics.jsonl", records)):
        journal = Journal(folder / name)
        for entry in entries:
            journal.write(entry)
        journal.close()
    return read_run(folder)


def step(iteration, time, **changes):
    return record(iteration, **{"time": time, "step_ms": 1000.0, "snapshot_stall_ms": 0.0, **changes})


def test_each_second_has_one_cause(tmp_path):
    """Start 2 s, 10 steps of 1 s (the first takes 4 s), an evaluation of 3 s, a failure after step 10, 5 s until the resume from
    step 8, two steps again, and 10 steps more with a stall of 100 ms each."""
    records = [step(1, 106.0, step_ms=4000.0), *(step(i, 105.0 + i) for i in range(2, 11))]
    records[-1]["evaluation_ms"] = 3000.0
    records += [step(i, 115.0 + 8 + i - 8, snapshot_stall_ms=100.0) for i in range(9, 21)]
    events = [
        {"time": 100.0, "event": "started"},
        {"time": 118.0, "event": "failure", "rank": 1},
        {"time": 118.5, "event": "failure", "rank": 0},
        {"time": 122.0, "event": "started"},
        {"time": 123.0, "event": "resumed", "step": 8, "steps_lost": 2},
        {"time": 135.0, "event": "finished"},
    ]
    found = goodput(write(tmp_path / "run", events, records))
    assert found is not None and found.total == 35.0 and found.unknown == []
    expected = {
        "useful": 20 - 12 * 0.1, "compile": 3.0, "stall": 1.2, "restart": 5.0, "replay": 2.0, "evaluation": 0.0,
        "other": 35 - 20 - 3 - 5 - 2,
    }  # fmt: skip
    assert found.seconds == pytest.approx(expected)  # the evaluated step 10 was computed again, without an evaluation
    assert found.share == pytest.approx(found.seconds["useful"] / 35)


def test_time_after_the_run_was_stopped_is_not_lost(tmp_path):
    events = [
        {"time": 0.0, "event": "started"},
        {"time": 10.0, "event": "finished", "stopped": True},
        {"time": 5000.0, "event": "started"},
        {"time": 5000.5, "event": "resumed", "step": 10},
        {"time": 5010.0, "event": "finished"},
    ]
    records = [step(10, 10.0, evaluation_ms=500.0), step(19, 5009.5)]
    found = goodput(write(tmp_path / "run", events, records))
    assert found is not None and found.total == 20.0
    assert found.seconds["useful"] == pytest.approx(19.0) and found.seconds["evaluation"] == 0.5
    assert "snapshot stalls between" in found.unknown[0]


def test_a_measured_time_since_the_failure_counts(tmp_path):
    events = [
        {"time": 0.0, "event": "started"},
        {"time": 10.0, "event": "failure"},
        {"time": 12.0, "event": "resumed", "step": 9, "seconds_since_failure": 2.75},
    ]
    found = goodput(write(tmp_path / "run", events, [step(i, float(i)) for i in range(1, 10)]))
    assert found is not None and found.seconds["restart"] == 2.75
    events[-1]["timeline"] = {"imports": 1.0, "first step": 0.75}  # a step counts as useful, not as part of the restart
    found = goodput(write(tmp_path / "other", events, [step(i, float(i)) for i in range(1, 10)]))
    assert found is not None and found.seconds["restart"] == 2.0


def test_a_failure_without_a_snapshot_costs_the_time_until_the_next_start(tmp_path):
    events = [{"time": 0.0, "event": "started"}, {"time": 1.0, "event": "failure"}, {"time": 4.0, "event": "started"}]
    found = goodput(write(tmp_path / "run", events, [step(1, 6.0)]))
    assert found is not None and found.seconds["restart"] == 3.0


def test_old_runs_say_what_is_unknown_and_runs_without_steps_have_no_goodput(tmp_path):
    old = [record(i) for i in range(1, 5)] + [record(5, validation_loss=2.0)]
    found = goodput(
        write(tmp_path / "old", [{"time": 0.0, "event": "started"}, {"time": 9.0, "event": "finished"}], old)
    )
    assert found is not None and len(found.unknown) == 2
    assert goodput(write(tmp_path / "new", [{"time": 0.0, "event": "started"}], [])) is None
    assert goodput(write(tmp_path / "bare", [], [record(1)])) is None
