"""One tiny run with one injected fault, started again until it ends, and what must hold afterwards.

The fault hits the first start of a run, or the second one after the first was killed. Then the run is started without faults.
A failed rank ends the others, as torchelastic does.
"""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from tests.snapshot.harness import Run, build, state_hash
from tests.snapshot.injection.layer import Fault, Layer, Site, faults_of
from tests.snapshot.injection.processes import KILLED_AFTER, Start

STEPS, KEEP_LAST = 6, 2
START_LIMIT, END_LIMIT = 100.0, 30.0


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    name: str
    share: int
    """of the seeds, relative to the other kinds"""
    world: int = 1
    nodes: int = 1
    """2: two folders of one machine, each with its keeper; snapshots are copied to the peer"""
    resumed: bool = False
    """the fault hits the second start, after all ranks were killed"""
    lost_node: bool = False
    """the keepers were killed with the ranks, and the memory of the last node is gone"""
    interpreter: bool = False
    """keepers are new interpreters, and faults hit only them"""


KINDS = (
    Kind("fresh", 10),
    Kind("resumed", 10, resumed=True),
    Kind("new interpreter", 2, interpreter=True),
    Kind("two ranks", 2, world=2),
    Kind("two ranks resumed", 2, world=2, resumed=True),
    Kind("two nodes", 2, world=2, nodes=2),
    Kind("lost node", 2, world=2, nodes=2, resumed=True, lost_node=True),
)


@dataclass
class Outcome:
    seed: int
    fault: str
    fired: bool = False
    wrong: list[str] = field(default_factory=list)


def choose_kind(seed: int) -> Kind:
    return random.Random(seed).choices(KINDS, [kind.share for kind in KINDS])[0]


def choose_fault(seed: int, sites: list[Site]) -> Fault:
    """The fault of a seed. A site more or less in the catalogue changes few other seeds."""
    site = max(sites, key=lambda site: sha256(f"{seed} {site}".encode()).digest())
    return Fault(site, random.Random(-seed - 1).choice(faults_of(site.call)))


class Scenario:
    def __init__(self, kind: Kind, folder: Path, memory: Path, hashes: dict[int, dict[int, str]]) -> None:
        self.kind, self.folder, self._hashes = kind, folder, hashes[kind.world]
        shutil.rmtree(folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        options = {"keep_last": KEEP_LAST, "mode": "peer" if kind.nodes > 1 else "node"}
        self.run = Run(folder / "run", memory, kind.world, STEPS, options=options, nodes=kind.nodes)
        for rank in range(kind.world):
            self.run.memory_of(rank).mkdir(parents=True, exist_ok=True)
        self._starts = 0
        self.wrong: list[str] = []

    def start(self, fault: Fault | None = None, record: bool = False, die_after: int | None = None) -> list[int] | None:
        """One start of the ranks; their exit statuses (negative: a signal), None if they do not end."""
        self._starts += 1
        layer = Layer("", fault, self.folder, record)
        start = Start(self._starts, self.run, self.folder, layer, self.kind.interpreter, die_after)
        running = {start.fork(rank): rank for rank in range(self.run.world)}
        statuses = [0] * self.run.world
        deadline = time.monotonic() + START_LIMIT
        while running:
            for process in list(running):
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
                    if status:
                        _end(running, signal.SIGKILL)
            if time.monotonic() > deadline:
                _end(running, signal.SIGABRT)  # shows the stacks
                time.sleep(0.5)
                _end(running, signal.SIGKILL)
                for process in running:
                    os.waitpid(process, 0)
                return None
            time.sleep(0.005)
        return statuses

    def trace(self, what: str) -> list[list[str]]:
        path = self.folder / "trace"
        if not path.exists():  # it died before its first line
            return []
        lines = (line.split("\t") for line in path.read_text().splitlines())
        return [fields[1:] for fields in lines if fields[0] == what]

    def prepare(self) -> None:
        """What comes before the start that the fault hits."""
        if self.kind.resumed:
            self.start(die_after=KILLED_AFTER)
        if self.kind.lost_node:
            self.kill_keepers()
            shutil.rmtree(self.run.memory_of(self.run.world - 1))
            self.run.memory_of(self.run.world - 1).mkdir()

    def disturb(self, seed: int, fault: Fault) -> Outcome:
        """Runs, with the fault, to the end of an undisturbed start."""
        self.prepare()
        statuses = self.start(fault)
        held = self._held_steps()
        if statuses is None:
            self.wrong.append("the ranks with the fault do not end")
        elif not any(statuses):
            self._check_last_step_on_disk("exit status 0")
        elif not (fault.do.startswith("die") and fault.site.role.startswith("trainer") and -signal.SIGKILL in statuses):
            self._check_first_error(statuses)
        if self.start() != [0] * self.run.world:
            self.wrong.append(f"the start without faults fails: {self.trace('error')[-1:]}")
        else:
            self._check_restored(held)
            self._check_last_step_on_disk("the last start")
            self.check_nothing_is_left()
        self.wrong += [f"a keeper died: {' '.join(fields)}" for fields in self.trace("keeper died")]
        self.wrong += [f"the peer got no copy: {' '.join(fields)}" for fields in self.trace("not copied")]
        return Outcome(seed, f"{self.kind.name}: {fault}", (self.folder / "fired").exists(), self.wrong)

    def _held_steps(self) -> int:
        """The newest step that was whole in memory or, where a node is lost, copied to its peer."""
        newest = 0
        for start in range(1, self._starts + 1):
            what = "copied" if self.kind.lost_node and start == 1 else "held"
            held = [(rank, int(step)) for number, rank, step in self.trace(what) if int(number) == start]
            by_rank = [
                max((step for rank, step in held if rank == str(own)), default=0) for own in range(self.run.world)
            ]
            newest = max(newest, min(by_rank))
        return newest

    def _check_first_error(self, statuses: list[int]) -> None:
        """What ends the first rank must be an error for the user that names its cause; the others may follow from it."""
        errors = [error for error in self.trace("error") if int(error[0]) == self._starts]
        if not errors:
            self.wrong.append(f"the ranks end with {statuses} without an error")
        elif errors[0][2] != "HoldfastError" or len(errors[0][3]) < 20:
            self.wrong.append(f"the ranks end with {statuses}: {errors[0]}")

    def _check_restored(self, held: int) -> None:
        steps: dict[str, set[int]] = {}
        for start, _, step, found in self.trace("restored"):
            steps.setdefault(start, set()).add(int(step))
            if int(step) and found != self._hashes[int(step)]:
                self.wrong.append(f"what was restored is not the state of step {step}")
        self.wrong += [f"ranks restored different steps: {found}" for found in steps.values() if len(found) > 1]
        if (resumed := min(steps[str(self._starts)])) < held:
            self.wrong.append(f"step {held} was held whole and the run resumed from step {resumed}")

    def _check_last_step_on_disk(self, when: str) -> None:
        from holdfast.checkpoint import State, load, open_checkpoint
        from holdfast.checkpoint.folder import checkpoints_in

        on_disk = dict(checkpoints_in(self.run.folder))
        if STEPS not in on_disk:
            self.wrong.append(f"{when}, and step {STEPS} is not on disk: {sorted(on_disk)}")
            return
        model, optimizer = build(replace(self.run, world=1))
        load(on_disk[STEPS], State(model, optimizer))
        if state_hash(model, optimizer) != self._hashes[STEPS]:
            self.wrong.append(f"{when}, and step {STEPS} on disk has another state")
        for path in on_disk.values():
            with open_checkpoint(path) as checkpoint:
                checkpoint.verify()

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + END_LIMIT
        while left := self._left():
            if time.monotonic() > deadline:
                self.wrong.append(f"left behind: {left}")
                break
            time.sleep(0.02)
        newest = (self.run.folder / "checkpoints" / "latest").read_text().strip()
        if newest != f"step-{STEPS:08d}":
            self.wrong.append(f"latest names {newest}")
        on_disk = list((self.run.folder / "checkpoints").glob("step-*"))
        if len(on_disk) > KEEP_LAST + 1:  # and the one that the run resumed from
            self.wrong.append(f"{sorted(path.name for path in on_disk)} are on disk with keep_last={KEEP_LAST}")

    def _left(self) -> list[str]:
        left = [f"{role} (process {process})" for role, process in self._live_keepers()]
        left += [str(Path(folder, name)) for folder, _, names in os.walk(self.run.memory) for name in names]
        left += [str(path) for path in (self.run.folder / "keepers").glob("*.json")]
        left += [str(path) for path in (self.run.folder / "checkpoints").glob(".*")]
        return left + [str(path) for path in self.run.folder.rglob("*.tmp")]

    def _live_keepers(self) -> list[tuple[str, int]]:
        from holdfast.system.processes import process_alive

        keepers = [(role, int(process), int(started)) for role, process, started in self.trace("keeper")]
        return [(role, process) for role, process, started in keepers if process_alive(process, started)]

    def kill_keepers(self) -> None:
        _end([process for _, process in self._live_keepers()], signal.SIGKILL)
        deadline = time.monotonic() + END_LIMIT
        while self._live_keepers() and time.monotonic() < deadline:
            time.sleep(0.005)

    def end(self) -> None:
        """Kills what is still there and removes the memory."""
        self.kill_keepers()
        shutil.rmtree(self.run.memory, ignore_errors=True)


def _end(processes: "list[int] | dict[int, int]", number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
