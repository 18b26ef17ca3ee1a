"""`holdfast bench convert` runs, and its contenders write the same tensors."""

import pytest

from holdfast.bench.convert import ConvertBench, run
from holdfast.system.errors import UsageError


def test_all_contenders_are_measured_on_a_tiny_model(tmp_path):
    tables = run(ConvertBench(layers=1, hidden_size=64, rounds=1, folder=str(tmp_path)))
    (rows,) = tables.values()
    assert [row["contender"] for row in rows] == ["copy", "holdfast", "torch"] and rows[0]["× copy"] == 1
    assert all(row["median s"] > 0 and row["peak RSS MB"] > 1 for row in rows) and not list(tmp_path.iterdir())


def test_an_unknown_contender_is_refused():
    with pytest.raises(UsageError, match="there is no contender .*there are: torch"):
        run(ConvertBench(against=("nothing",)))
