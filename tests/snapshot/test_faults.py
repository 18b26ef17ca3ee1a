"""One fault in one system call of a run, chosen by seed: no state is lost, the exit status is true, and nothing is left behind.

To repeat one seed: pytest tests/snapshot/test_faults.py -m '' -k 'seed17-'
"""

import pytest

from tests.snapshot.harness import Run
from tests.snapshot.injection.campaign import campaign

FEW, MANY = 60, 1500
SEEDS = [pytest.param(n, id=f"seed{n}-", marks=[pytest.mark.slow] if n >= FEW else []) for n in range(MANY)]


@pytest.fixture(scope="module")
def outcome_of(request, tmp_path_factory, oracle):
    from tests.snapshot.harness import memory_folder

    folder = tmp_path_factory.mktemp("faults")
    seeds = [
        item.callspec.params["seed"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    hashes = {world: oracle(Run(folder, folder, world)) for world in (1, 2)}
    with memory_folder() as memory, campaign(folder, memory, hashes, seeds) as outcome_of:
        yield outcome_of


@pytest.fixture(scope="module")
def fired():
    return []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault(outcome_of, fired, seed):
    outcome = outcome_of(seed)
    fired.append(outcome.fired)
    assert not outcome.wrong, f"seed {seed}: {outcome.fault}\n" + "\n".join(outcome.wrong)


def test_most_faults_happen(fired):
    """A fault whose call is not made is not a test."""
    assert len(fired) < 50 or sum(fired) > 0.7 * len(fired), f"{sum(fired)} of {len(fired)} faults happened"
