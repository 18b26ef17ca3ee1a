"""Many seeds on a few processes at a time, and the catalogue of sites that they choose from."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.snapshot.harness import context
from tests.snapshot.injection.layer import Site
from tests.snapshot.injection.scenario import KINDS, Outcome, Scenario, choose

WORKERS = 4
SEED_LIMIT = 400.0


def record_catalogue(folder: Path, memory: Path, hashes: dict[int, str]) -> dict[str, list[Site]]:
    """The sites that undisturbed runs pass, by kind of run."""
    found: dict[str, list[Site]] = {}
    for kind in KINDS:
        scenario = Scenario(-1, folder / kind, memory / kind, hashes)
        record = folder / f"{kind}.sites"
        if kind == "resumed":
            scenario.start(die_after=3)
        scenario.start(record=record)
        wrong: list[str] = []
        scenario._check_nothing_is_left(wrong)
        assert not wrong, wrong
        scenario.end()
        lines = {tuple(line.split("\t")) for line in record.read_text().splitlines()}
        found[kind] = sorted(Site(role, call, caller, int(n)) for role, call, caller, n in lines)
    return found


def run_seeds(folder: Path, memory: Path, hashes: dict[int, str], catalogue: Any, seeds: Any, answers: Any) -> None:
    """One worker: takes seeds until none is left."""
    if catalogue is None:
        try:
            answers.put(record_catalogue(folder, memory, hashes))
        except BaseException as error:
            answers.put(error)
        return
    while (seed := seeds.get()) is not None:
        kind, fault = choose(seed, catalogue)
        scenario = Scenario(seed, folder / f"seed-{seed}", memory / f"seed-{seed}", hashes)
        try:
            outcome = scenario.disturbed(kind, fault)
        except Exception as error:
            outcome = Outcome(seed, str(fault), True, [f"{type(error).__name__}: {error}"])
        scenario.end()
        answers.put(outcome)


@contextmanager
def campaign(
    folder: Path, memory: Path, hashes: dict[int, str], seeds: list[int]
) -> Iterator[Callable[[int], Outcome]]:
    """Works on the seeds in the background; the function it yields waits for the outcome of one."""
    answers, waiting = context.Queue(), context.Queue()
    recorder = context.Process(target=run_seeds, args=(folder, memory, hashes, None, None, answers))
    recorder.start()
    catalogue = answers.get(timeout=SEED_LIMIT)
    recorder.join()
    if isinstance(catalogue, BaseException):
        raise catalogue
    for seed in [*seeds, *[None] * WORKERS]:
        waiting.put(seed)
    workers = [
        context.Process(target=run_seeds, args=(folder, memory, hashes, catalogue, waiting, answers))
        for _ in range(min(WORKERS, len(seeds)))
    ]
    for worker in workers:
        worker.start()
    known: dict[int, Outcome] = {}

    def outcome_of(seed: int) -> Outcome:
        while seed not in known:
            try:
                outcome = answers.get(timeout=SEED_LIMIT)
            except queue.Empty:
                raise AssertionError(f"no scenario ended within {SEED_LIMIT} s; see {folder}") from None
            known[outcome.seed] = outcome
        return known[seed]

    yield outcome_of
    for worker in workers:
        worker.join(5)
        worker.kill()
