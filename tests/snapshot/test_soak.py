"""Many crashes at random instants; row 30 of the matrix. The long one is marked slow."""

import random

import pytest

from tests.snapshot.harness import Fault

pytestmark = pytest.mark.distributed
POINTS = ["forward", "backward", "committed", "stepped", "taken"]


def crashes(steps, mean, seed):
    """A rank is killed every so many steps, at a random point."""
    chance = random.Random(seed)
    faults, step = [], 0
    while (step := step + 1 + int(chance.expovariate(1 / mean))) < steps:
        faults.append(
            Fault("kill", rank=chance.randrange(2), step=step, point=chance.choice(POINTS), attempts=(len(faults),))
        )
    return faults


def test_a_short_soak_ends_as_the_undisturbed_run(run, check):
    run.steps = 60
    run.faults = crashes(60, 12, seed=5)
    assert len(run.faults) >= 3
    assert check(run, restarts=len(run.faults)) == len(run.faults)


def test_nothing_grows_from_step_to_step(run, check):
    run.world, run.steps = 1, 300
    check(run)
    early, *_, late = run.trace("resources")
    assert late["descriptors"] <= early["descriptors"] and late["threads"] <= early["threads"]
    assert late["private"] < early["private"] + (8 << 20)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ten_thousand_steps_with_a_crash_every_twenty(run, check):
    run.steps = 10_000
    run.faults = crashes(10_000, 20, seed=1)
    assert check(run, restarts=len(run.faults)) == len(run.faults)
