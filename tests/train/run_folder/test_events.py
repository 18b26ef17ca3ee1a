"""Events in words: one sentence per failure, whatever was recorded about it."""

import pytest

from holdfast.train.run_folder.events import describe_event, describe_events, last_failure


def event(time, name, **details):
    return {"time": time, "event": name, **details}


KILLED = [
    event(100.0, "failure", kind="died", rank=1, step=300, cause="", ranks={}),
    event(100.1, "persisted", step=300, path="/r/checkpoints/step-00000300", reason="died", bytes=1000, seconds=0.07),
    event(100.4, "failure", kind="died", rank=0, step=300, cause="RuntimeError: Connection closed by peer"),
    event(100.5, "failure", kind="exit", rank=1, cause="killed by SIGKILL", exit_code=-9),
    event(101.0, "started", world=2, nodes=1, restart=1),
    event(101.2, "resumed", source="memory", step=299, steps_lost=1, seconds=0.06),
]


def test_a_killed_rank_and_its_resume_are_one_sentence():
    entries = describe_events([event(0.0, "started", world=2, nodes=1, restart=0), *KILLED])
    assert [entry.text for entry in entries] == [
        "2 ranks started",
        "rank 1 was killed by SIGKILL at step 300; resumed from memory 1.2 s later, 1 step repeated",
        "checkpoint step-00000300 written because a rank failed, 1.0 KB, in 0.07 s",
    ]
    assert [entry.kind for entry in entries] == ["started", "failed", "saved"] and entries[1].step == 300


def test_without_a_supervisor_the_rank_that_left_no_error_is_the_cause():
    entries = describe_events([KILLED[2], KILLED[0]])
    assert [entry.text for entry in entries] == [
        "rank 1 died without an error message at step 300; the run did not continue"
    ]


def test_two_failures_in_a_row_are_two_sentences():
    oom = event(200.0, "failure", kind="exit", rank=0, cause="OutOfMemoryError: CUDA out of memory", exit_code=1)
    first, second = describe_events([*KILLED[:1], KILLED[4], oom])
    assert first.text.endswith("; all ranks started again 1 s later")
    assert second.text == "rank 0 failed: OutOfMemoryError: CUDA out of memory; the run did not continue"
    cause, text = last_failure([*KILLED, oom])
    assert cause == oom and text == second.text
    cause, text = last_failure(KILLED)
    assert cause["exit_code"] == -9 and "killed by SIGKILL at step 300" in text
    assert last_failure([event(1.0, "started")]) is None


@pytest.mark.parametrize(
    ("record", "kind", "text"),
    [
        (event(1, "resumed", source="disk", step=1000, steps_lost=0, seconds=2.5), "resumed",
         "resumed from disk at step 1,000, no step repeated, in 2.5 s"),
        (event(1, "finished", step=10, stopped=True, reason="SIGTERM", skipped=1), "stopped",
         "stopped on request (SIGTERM) at step 10; 1 snapshot skipped"),
        (event(1, "finished", step=10, stopped=False, skipped=0), "finished", "finished at step 10"),
        (event(1, "refused", reason="No space left on device", tries=2), "refused", "No space left on device (try 2)"),
        (event(1, "snapshot", step=7, outcome="peer", node="b:/dev/shm", seconds=0.2), "snapshot",
         "snapshot of step 7 copied to node b:/dev/shm, in 0.2 s"),
        (event(1, "snapshot", step=7, outcome="damaged", reason="row 3"), "snapshot", "snapshot of step 7 damaged: row 3"),
        (event(1, "persisted", step=7, path="/r/step-00000007", reason="persist", bytes=5, seconds=1), "saved",
         "checkpoint step-00000007 written because `holdfast persist` asked for it, 5 B, in 1 s"),
        (event(1, "failure", kind="hung", rank=3, step=9, cause=""), "failed",
         "rank 3 hung at step 9; the run did not continue"),
        (event(1, "unheard of", colour="red"), "unheard of", "colour red"),
    ],
)  # fmt: skip
def test_each_kind_of_event_has_words(record, kind, text):
    (entry,) = describe_events([record])
    assert (entry.kind, entry.text) == (kind, text)


@pytest.mark.parametrize(
    "name", ["started", "failure", "resumed", "persisted", "finished", "refused", "snapshot", "other"]
)
def test_records_with_missing_or_odd_values_still_get_words(name):
    odd = {
        key: ["x"]
        for key in ("step", "rank", "world", "steps_lost", "seconds", "bytes", "reason", "cause", "path", "skipped")
    }
    for record in (event(1, name), event(1, name, **odd)):
        (entry,) = describe_events([record])
        assert entry.kind and isinstance(entry.text, str)


def test_a_resume_shows_how_long_after_the_failure_the_ranks_measured_it():
    resumed = {"time": 15.0, "event": "resumed", "source": "memory", "step": 7, "seconds_since_failure": 2.345}
    assert describe_event(resumed).text == "resumed from memory at step 7, 2.35 s after the failure, no step repeated"
    (entry,) = describe_events([{"time": 10.0, "event": "failure", "rank": 1}, resumed])
    assert entry.text == "rank 1 died without an error message; resumed from memory 2.35 s later, no step repeated"
