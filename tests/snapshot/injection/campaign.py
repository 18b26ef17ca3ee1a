"""Many seeds on a few processes at a time, and the catalogue of sites that they choose from."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.snapshot.harness import context
from tests.snapshot.injection.layer import Fault, Site
from tests.snapshot.injection.scenario import KINDS, Kind, Outcome, Scenario, choose_fault, choose_kind

WORKERS = 4
SEED_LIMIT = 400.0


class Task(NamedTuple):
    kind: Kind
    seed: int = -1
    fault: Fault | None = None
    """None: no fault, the sites that the run passes are recorded."""


def record_sites(scenario: Scenario) -> tuple[Kind, list[Site]]:
    """The sites that an undisturbed run passes."""
    scenario.prepare()
    assert scenario.start(record=True) == [0] * scenario.run.world, scenario.trace("error")
    scenario.check_nothing_is_left()
    assert not scenario.wrong and not scenario.trace("keeper died"), (scenario.wrong, scenario.trace("keeper died"))
    lines = {tuple(line.split("\t")) for line in (scenario.folder / "sites").read_text().splitlines()}
    sites = sorted(Site(role, call, caller, int(n)) for role, call, caller, n in lines)
    only_keepers = scenario.kind.interpreter
    return scenario.kind, [site for site in sites if site.role.startswith("keeper") or not only_keepers]


def work(folder: Path, memory: Path, hashes: dict[int, dict[int, str]], tasks: Any, answers: Any) -> None:
    """One worker: does tasks until none is left."""
    from cryptography import x509  # noqa: F401  (keepers that are forked later have it)

    while (task := tasks.get()) is not None:
        name = f"seed-{task.seed}" if task.fault else task.kind.name.replace(" ", "-")
        scenario = Scenario(task.kind, folder / name, memory / name, hashes)
        try:
            answers.put(scenario.disturb(task.seed, task.fault) if task.fault else record_sites(scenario))
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
            answers.put(Outcome(task.seed, str(task.fault), True, wrong) if task.fault else error)
        scenario.end()


@contextmanager
def campaign(
    folder: Path, memory: Path, hashes: dict[int, dict[int, str]], seeds: list[int]
) -> Iterator[Callable[[int], Outcome]]:
    """Works on the seeds in the background; the function it yields waits for the outcome of one."""
    answers, tasks = context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(folder, memory, hashes, tasks, answers))
        for _ in range(min(WORKERS, max(2, len(seeds))))
    ]
    for worker in workers:
        worker.start()
    try:
        kinds = {seed: choose_kind(seed) for seed in seeds}
        needed = [kind for kind in KINDS if kind in kinds.values()]
        catalogue = dict(_record_catalogue(needed, tasks, answers))
        for seed, kind in kinds.items():
            tasks.put(Task(kind, seed, choose_fault(seed, catalogue[kind])))
        for _ in workers:
            tasks.put(None)
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
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()


def _record_catalogue(kinds: list[Kind], tasks: Any, answers: Any) -> Iterator[tuple[Kind, list[Site]]]:
    for kind in kinds:
        tasks.put(Task(kind))
    for _ in kinds:
        answer = answers.get(timeout=SEED_LIMIT)
        if isinstance(answer, BaseException):
            raise answer
        yield answer
