"""What `train --json` prints: one object about the run, also when it was stopped; nothing for a run that failed."""

import json

import pytest

from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from holdfast.train.run_folder.result import print_result


@pytest.fixture
def stopped_run(tmp_path):
    """The journals of a run that was asked to stop after step 3."""
    metrics = Journal(tmp_path / "metrics.jsonl")
    metrics.write({"iteration": 2, "loss": 5.0, "validation_loss": 4.5})
    metrics.write({"iteration": 3, "loss": 4.0})
    metrics.close()
    events = Journal(tmp_path / "events.jsonl")
    events.event("finished", step=3, stopped=True)
    events.close()
    return tmp_path


def test_a_run_that_was_stopped_is_not_finished(stopped_run, capsys):
    with pytest.raises(SystemExit), print_result(str(stopped_run)):
        raise SystemExit(0)
    assert json.loads(capsys.readouterr().out) == {
        "run": str(stopped_run),
        "iteration": 3,
        "loss": 4.0,
        "validation_loss": 4.5,
        "finished": False,
        "checkpoint": None,
    }


def test_a_failed_run_prints_no_result(stopped_run, capsys):
    with pytest.raises(HoldfastError), print_result(str(stopped_run)):
        raise HoldfastError("gave up")
    assert capsys.readouterr().out == ""


def test_a_run_without_a_folder_only_finishes(capsys):
    with print_result(None):
        pass
    assert json.loads(capsys.readouterr().out) == {"run": None, "finished": True}
