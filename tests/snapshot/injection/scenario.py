"""One tiny run with one injected fault, started again until it ends, and what must hold afterwards.

`fresh`: the fault hits the first start. `resumed`: the first start is killed after step 3, the fault hits the second. Then the
run is started without faults. Trainers are forked from a process that has imported torch, keepers from trainers: a start of the
interpreter would cost more than everything else. The limits of waits are shortened; the rules are not.
"""

import faulthandler
import importlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.system.errors import HoldfastError
from tests.snapshot.harness import Run, build, state_hash
from tests.snapshot.injection.layer import Fault, Layer, Site, faults_of, install, note

STEPS, SAVE_EVERY, KEEP_LAST, KILLED_AFTER = 6, 2, 2, 3
START_LIMIT, END_LIMIT = 100.0, 60.0
KINDS = ("fresh", "resumed")
SHORTER = {
    "snapshots": {"CLOSE_SECONDS": 20.0, "KEEPER_CHECK_SECONDS": 0.2},
    "keeper_client": {
        "CHECK_SECONDS": 0.2,
        "LONGEST_CHECK_SECONDS": 0.5,
        "STABLE_SECONDS": 2.0,
        "FAILED_SAVE_SECONDS": 5.0,
    },
    "keeper": {"ROUND_SECONDS": 0.02, "RETRY_SECONDS": 0.2, "SAVE_PATIENCE": 5.0, "VERIFY_SECONDS": 0.2},
}


@dataclass
class Outcome:
    seed: int
    fault: str
    fired: bool = False
    wrong: list[str] = field(default_factory=list)


def choose(seed: int, catalogue: dict[str, list[Site]]) -> tuple[str, Fault]:
    """The kind of run and the fault of a seed. A site more or less in the catalogue changes few other seeds."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    site = max(catalogue[kind], key=lambda site: sha256(f"{seed} {site}".encode()).digest())
    return kind, Fault(site, chance.choice(faults_of(site.call)))


class Scenario:
    def __init__(self, seed: int, folder: Path, memory: Path, hashes: dict[int, str]) -> None:
        self.seed, self.folder, self._hashes = seed, folder, hashes
        shutil.rmtree(folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        memory.mkdir()
        self.run = Run(folder / "run", memory, world=1, steps=STEPS, options={"keep_last": KEEP_LAST})
        self._starts = 0

    def start(self, fault: Fault | None = None, record: Path | None = None, die_after: int | None = None) -> int | None:
        """One start of the trainer; its exit status (negative: a signal), None if it did not end."""
        self._starts += 1
        layer = Layer("trainer", fault, self.folder / "fired", record)
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            _live(self, layer, die_after)
        deadline = time.monotonic() + START_LIMIT
        while True:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                self._show_stacks(process)
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return None
            time.sleep(0.005)

    def _show_stacks(self, process: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGABRT)
            time.sleep(0.5)

    def trace(self, what: str) -> list[list[str]]:
        if not self._trace_file.exists():  # it died before its first line
            return []
        lines = (line.split("\t") for line in self._trace_file.read_text().splitlines())
        return [fields[1:] for fields in lines if fields[0] == what]

    def note(self, *fields: object) -> None:
        note(self._trace_file, "\t".join(str(one).replace("\n", " | ") for one in fields))

    @property
    def _trace_file(self) -> Path:
        return self.folder / "trace"

    def disturbed(self, kind: str, fault: Fault) -> Outcome:
        """Runs, with the fault, to the end of an undisturbed start."""
        outcome = Outcome(self.seed, f"{kind}: {fault}")
        wrong = outcome.wrong
        if kind == "resumed":
            self.start(die_after=KILLED_AFTER)
        status = self.start(fault)
        outcome.fired = (self.folder / "fired").exists()
        died = fault.do.startswith("die") and fault.site.role == "trainer"
        held = max((int(step) for (step,) in self.trace("held")), default=0)
        if status is None:
            wrong.append("the trainer with the fault does not end")
        elif status == 0:
            self._check_last_step_on_disk(wrong, "exit status 0")
        elif status != -signal.SIGKILL or not died:
            wrong += [f"the trainer ends with {status}: {error}" for error in self._errors()]
        self._start_again(wrong, held)
        return outcome

    def _errors(self) -> list[str]:
        """What ended the trainer and is not an error for the user that names its cause."""
        found = self.trace("error")
        return [f"{kind}: {text}" for kind, text in found if kind != "HoldfastError" or len(text) < 20] or (
            [] if found else ["no error"]
        )

    def _start_again(self, wrong: list[str], held: int) -> None:
        before = len(self.trace("restored"))
        status = self.start()
        if status != 0:
            wrong.append(f"the start without faults ends with {status}: {self.trace('error')[-1:]}")
            return
        for step, found in self.trace("restored"):
            if int(step) and found != self._hashes[int(step)]:
                wrong.append(f"what was restored is not the state of step {step}")
        (step, _) = self.trace("restored")[before]
        if int(step) < held:
            wrong.append(f"step {held} was held whole and the run resumed from step {step}")
        self._check_last_step_on_disk(wrong, "the last start")
        self._check_nothing_is_left(wrong)

    def _check_last_step_on_disk(self, wrong: list[str], when: str) -> None:
        from holdfast.checkpoint import State, load, open_checkpoint
        from holdfast.checkpoint.folder import checkpoints_in

        on_disk = dict(checkpoints_in(self.run.folder))
        if STEPS not in on_disk:
            wrong.append(f"{when}, and step {STEPS} is not on disk: {sorted(on_disk)}")
            return
        model, optimizer = build(self.run)
        load(on_disk[STEPS], State(model, optimizer))
        if state_hash(model, optimizer) != self._hashes[STEPS]:
            wrong.append(f"{when}, and step {STEPS} on disk has another state")
        for path in on_disk.values():
            with open_checkpoint(path) as checkpoint:
                checkpoint.verify()

    def _check_nothing_is_left(self, wrong: list[str]) -> None:
        keepers = [(int(process), int(started)) for process, started in self.trace("keeper")]
        deadline = time.monotonic() + END_LIMIT
        while left := self._left(keepers):
            if time.monotonic() > deadline:
                wrong.append(f"left behind: {left}")
                break
            time.sleep(0.02)
        newest = (self.run.folder / "checkpoints" / "latest").read_text().strip()
        if newest != f"step-{STEPS:08d}":
            wrong.append(f"latest names {newest}")
        on_disk = list((self.run.folder / "checkpoints").glob("step-*"))
        if len(on_disk) > KEEP_LAST + 1:  # and the one that the run resumed from
            wrong.append(f"{sorted(path.name for path in on_disk)} are on disk with keep_last={KEEP_LAST}")

    def _left(self, keepers: Sequence[tuple[int, int]]) -> list[str]:
        from holdfast.system.processes import process_alive

        left = [f"keeper {process}" for process, started in keepers if process_alive(process, started)]
        left += [str(Path(folder, name)) for folder, _, names in os.walk(self.run.memory) for name in names]
        return left + [str(path) for path in self.run.folder.rglob("*.tmp")]

    def end(self) -> None:
        """Kills what is still there and removes the files."""
        from holdfast.system.processes import process_alive

        for process, started in self.trace("keeper"):
            if process_alive(int(process), int(started)):
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        shutil.rmtree(self.run.memory, ignore_errors=True)


def _live(scenario: Scenario, layer: Layer, die_after: int | None) -> None:
    """The trainer's process, to its end."""
    log = os.open(scenario.folder / f"trainer-{scenario._starts}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log, all_threads=True)  # for SIGABRT, too
    os.environ["HOLDFAST_LEASE_SECONDS"] = "3"
    status = 0
    try:
        shorten_waits()
        starting = importlib.import_module("holdfast.snapshot.keeper.starting")
        install(layer)
        starting.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
            run=lambda command, **named: _start_keeper(scenario, layer, command[-1], named),
            DEVNULL=None,
            PIPE=None,
        )
        _train(scenario, die_after)
    except HoldfastError as error:
        scenario.note("error", "HoldfastError", error)
        status = 1
    except BaseException as error:
        traceback.print_exc()
        scenario.note("error", type(error).__name__, f"{error} {''.join(traceback.format_exception(error)[-3:])}")
        status = 3
    os._exit(status)


def shorten_waits() -> None:
    for name, values in SHORTER.items():
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(f"holdfast.snapshot.{name}")
            for constant, value in values.items():
                if hasattr(module, constant):
                    setattr(module, constant, value)


def _train(scenario: Scenario, die_after: int | None) -> None:
    import torch

    from holdfast.snapshot import Snapshots

    run = scenario.run
    torch.set_num_threads(1)
    model, optimizer = build(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    snapshots = Snapshots(
        run.name, model, optimizer, {"scheduler": scheduler}, run.folder, memory=run.memory, **run.options
    )
    step = snapshots.restore()
    if not step:
        torch.manual_seed(100)
    scenario.note("restored", step, state_hash(model, optimizer))
    data = torch.Generator()
    while step < run.steps:
        data.manual_seed(step * 1000)
        loss = model(torch.randn(4, run.width, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        snapshots.commit()
        scenario.note("held", max(0, snapshots._ready))
        if step == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        step += 1
        snapshots.take(step)
        if step % SAVE_EVERY == 0:
            snapshots.save(step)
    snapshots.close()


def _start_keeper(scenario: Scenario, layer: Layer, path: str, named: dict[str, Any]) -> Any:
    """In place of a new interpreter: a process without parent, of its own session, forked from the trainer."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        child = os.fork()
        if child:
            os.write(writing, str(child).encode())
            os._exit(0)
        _keep(scenario, layer, path, named["env"])
    os.waitpid(process, 0)
    started = os.read(reading, 100)
    os.close(reading)
    os.close(writing)
    return SimpleNamespace(stdout=started)


def _keep(scenario: Scenario, layer: Layer, path: str, environment: dict[str, str]) -> None:
    from holdfast.snapshot.keeper import service as keeper
    from holdfast.system.processes import start_time

    status = 0
    try:
        os.closerange(3, 512)
        log = os.open(scenario.folder / "keeper.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        sys.excepthook = sys.__excepthook__
        faulthandler.unregister(signal.SIGUSR2)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        scenario.note("keeper", os.getpid(), start_time(os.getpid()))
        layer.become("keeper")
        keeper.main(path)
    except SystemExit as error:
        status = 1
        print(error, file=sys.stderr, flush=True)
    except BaseException as error:
        status = 1
        traceback.print_exc()
        scenario.note("keeper died", type(error).__name__, error)
    os._exit(status)
