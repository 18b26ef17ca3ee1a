"""Ranks that die or hang, in every way and at every point; rows 1-4, 11-16, 25 and 26 of the matrix of faults."""

import pytest

from .harness import Fault

pytestmark = pytest.mark.distributed


def test_an_undisturbed_run_leaves_nothing_behind(run, check):
    assert check(run) == 0
    assert [e["event"] for e in run.events()] == ["started", "finished"]


@pytest.mark.parametrize("point", ["forward", "backward", "committed", "stepped", "taken"])
def test_one_rank_killed(run, check, point):
    run.faults = [Fault("kill", rank=1, step=5, point=point)]
    assert check(run) == 1
    (resumed,) = run.events("resumed")
    assert resumed["step"] >= 4
    assert [e["rank"] for e in run.events("failure")][:1] in ([1], [0])
