"""The protocol explored exhaustively for small sizes, and defects that the explorer must find in it."""

from functools import partial

import pytest

from holdfast.checkpoint import retention
from tests.snapshot.model import files, ranks
from tests.snapshot.model.explorer import Explored, explore

DRIFT_ALONE = {"kills": 0, "saves": 0, "persists": 0, "crashes": 0}


def explore_ranks(rules: ranks.Rules, world: int = 2, **budget: int) -> Explored:
    return explore(
        ranks.State((ranks.Rank(),) * world, **budget),
        partial(ranks.actions, rules=rules),
        partial(ranks.invariant, rules=rules),
        ranks.is_over,
    )


def explore_claims(locked: bool = True, compares: str = "claims") -> Explored:
    return explore(files.Claims(), partial(files.claims, locked=locked, compares=compares), files.claims_hold)


@pytest.fixture
def explore_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "_is_sound", files.is_sound)

    def go(by_number: bool = False, keep_last: int = 2) -> Explored:
        disk = files.Disk(tmp_path / "checkpoints", 10, keep_last, by_number)
        return explore(files.Checkpoints(), disk.actions, disk.invariant)

    return go


def assert_sound(explored: Explored, at_least: int) -> None:
    assert explored.violation is None, explored.violation
    assert explored.states >= at_least, "the model has lost states: it no longer explores what it should"


def test_slots_commit_keeper_persist_and_restart():
    """Crash and keeper's death at every state, beside a save and a persist."""
    assert_sound(explore_ranks(ranks.Rules(steps=2)), 10_000)


def test_ranks_that_drift_with_a_save_and_a_crash():
    assert_sound(explore_ranks(ranks.Rules(steps=4, drift=2), kills=0, persists=0), 10_000)


@pytest.mark.parametrize("drift", [1, 2, 3])
def test_the_common_step_follows_ranks_that_drift(drift):
    assert_sound(explore_ranks(ranks.Rules(steps=8, drift=drift, lag=drift + 1, at_once=True), **DRIFT_ALONE), 1_000)


def test_several_nodes_exchange_what_they_hold():
    assert_sound(explore_ranks(ranks.Rules(steps=3, nodes=2, drift=2), persists=0), 10_000)


@pytest.mark.slow
def test_more_steps_and_ranks():
    assert_sound(explore_ranks(ranks.Rules(steps=3)), 50_000)
    assert_sound(explore_ranks(ranks.Rules(steps=3, nodes=2, drift=2)), 50_000)
    assert_sound(explore_ranks(ranks.Rules(steps=2, drift=2), world=3), 50_000)


def test_claims_of_the_memory():
    assert_sound(explore_claims(), 30)


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_retention_keeps_a_sound_checkpoint(explore_disk, keep_last):
    assert_sound(explore_disk(keep_last=keep_last), 10)


QUIET = {"crashes": 0}
MUTATIONS = {
    "a newer step counts as holding an older one": (
        partial(explore_ranks, ranks.Rules(steps=5, drift=2, exact_holding=False), **DRIFT_ALONE),
        "all ranks held step",
    ),
    "candidates are not kept": (
        partial(explore_ranks, ranks.Rules(steps=8, lag=5, at_once=True, candidates=False), **DRIFT_ALONE),
        "ahead of the newest common step",
    ),
    "the pin of a dead keeper stays": (
        partial(explore_ranks, ranks.Rules(clears_pins_of_dead_keeper=False), **QUIET),
        "no continuation without faults",
    ),
    "the request is removed before the checkpoint is there": (
        partial(explore_ranks, ranks.Rules(request_last=False), **QUIET),
        "is not on disk",
    ),
    "check, then claim without a lock": (partial(explore_claims, locked=False), "two starts own"),
    "freed without a second look": (partial(explore_claims, compares="nothing"), "of a living run was freed"),
    "freed after a look at the owner alone": (partial(explore_claims, compares="owner"), "a step that is not on disk"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_defect_is_found(name):
    explored, expected = MUTATIONS[name][0](), MUTATIONS[name][1]
    assert explored.violation is not None and expected in explored.violation


def test_retention_by_number_is_found(explore_disk):
    violation = explore_disk(by_number=True).violation
    assert violation is not None and "no sound checkpoint is left" in violation
