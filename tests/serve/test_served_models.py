"""What a server makes of the paths of its models."""

import shutil

import pytest

from holdfast.serve.served_models import load_service, service_names
from holdfast.system.errors import UsageError
from tests.generation.test_running import training  # noqa: F401 (a fixture)


def test_a_run_whose_state_is_in_memory_only_is_served(training, capsys):  # noqa: F811
    saved, _, snapshots = training
    snapshots.take(9)
    snapshots.commit()
    shutil.rmtree(saved.run / "checkpoints")
    service = load_service(str(saved.run), "run", slots=1, max_queue=1, tokenizer={})
    assert service.capabilities == ("completions",)
    assert capsys.readouterr().err.count("from its memory snapshot") == 1


def test_names_are_those_of_the_folders_and_differ(tmp_path):
    assert service_names(["runs/first", "other/first/"]) == ["first", "first-2"]
    with pytest.raises(UsageError, match="one or two models"):
        service_names(["a", "b", "c"])
