"""`bench restart`: the time from `kill -9` of a rank to the next completed optimizer step, and where it goes.

A real run (`holdfast train`) on random tokens loses a rank again and again: with ranks that start as new processes, that are
forked from one that has imported everything, and with `--standby`. The whole time is measured here, from the signal to the event
`resumed`, which is written after that step; its parts are those of the event.
"""

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.bench.harness import Row, Tables, show
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import read_journal
from holdfast.system.progress import log

if TYPE_CHECKING:
    from holdfast.snapshot.memory.run_memory import RunMemory

START_SECONDS = 300.0
STEPS_BETWEEN = 4
"""Steps that a run completes before the next kill."""
POLL_SECONDS = 0.005
VOCABULARY = 1000
MODES = {"new": ["--no-fork-server"], "forked": [], "standby": ["--standby"]}
SPARES_READY = re.compile(rb"standby: \d+ spares? ready")


@dataclass(frozen=True, kw_only=True)
class RestartBench:
    """Measure the time from kill -9 of a rank to the next completed step, and the parts of that time.

    Examples:

      holdfast bench restart
      holdfast bench restart --config gpt2_345m --ranks 1 --kills 3 --json
      holdfast bench restart --modes standby --kills 3 --every 30     # also steps with kills / without
    """

    config: str = "auto"
    """Configuration to train: a file or a name. auto: gpt2_345m with CUDA, gpt_tiny without."""
    ranks: int = 0
    """Ranks of the run. 0: one per GPU; 2 without CUDA."""
    modes: tuple[Literal["new", "forked", "standby"], ...] = ("new", "forked", "standby")
    """How ranks start again: as new processes, forked from one that has imported everything, or from spares that wait."""
    kills: int = 3
    """Kills per mode."""
    every: float = 0.0
    """Also compare the steps of intervals of this many seconds with a kill at their begin and without one, in turn, --kills of
    each. 0: do not."""
    batch_size: int = 8
    """Sequences per rank and step."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: RestartBench) -> None:
    show("restart", run(options), options.json)


def run(options: RestartBench) -> Tables:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    config = options.config if options.config != "auto" else "gpt2_345m" if devices else "gpt_tiny"
    ranks = options.ranks or devices or 2
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        command = _command(config, ranks, options.batch_size, _random_tokens(work / "tokens"))
        modes: dict[str, Measured] = {
            name: _measure(work / name, [*command, *MODES[name]], ranks, options.kills, options.every)
            for name in dict.fromkeys(options.modes)
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _tables(modes)


def _random_tokens(prefix: Path) -> Path:
    import numpy as np

    from holdfast.data.indexed import IndexedDatasetBuilder

    builder, random = IndexedDatasetBuilder(prefix, np.uint16), np.random.default_rng(0)
    for _ in range(64):
        builder.add_document(random.integers(VOCABULARY, size=4096).tolist())
    builder.finalize()
    return prefix


def _command(config: str, ranks: int, batch: int, data: Path) -> list[str]:
    from holdfast.train.run_folder.identity import read_run_config

    vocabulary = read_run_config(config).model.vocab_size or VOCABULARY
    flags = (
        f"--vocab-size {vocabulary} --split 100,0,0 --micro-batch-size {batch} --global-batch-size {batch * ranks} "
        f"--nproc-per-node {ranks} "
        "--train-iters 1000000 --eval-interval 0 --save-interval 0 --log-interval 1 --max-restarts 1000 --no-tensorboard"
    )
    return [sys.executable, "-m", "holdfast.cli", "train", config, *flags.split(), "--data-path", str(data)]


@dataclass(frozen=True)
class Measured:
    """One mode: its restarts, and the steps of intervals of `every` seconds, without and with a kill in turn."""

    restarts: "list[Restart]"
    undisturbed: list[int]
    killed: list[int]


@dataclass(frozen=True)
class Restart:
    """One kill: seconds to the next completed step, and the event `resumed`."""

    seconds: float
    resumed: dict[str, Any]


def _measure(run_folder: Path, command: list[str], ranks: int, kills: int, every: float) -> Measured:
    output = run_folder.with_suffix(".log")
    with output.open("wb") as stream:
        process = subprocess.Popen([*command, "--save", str(run_folder)], stdout=stream, stderr=stream)
    watched = _Run(run_folder, process, output, ranks)
    try:
        found = []
        for number in range(1, kills + 1):
            watched.wait_until_ready("--standby" in command, number)
            found.append(watched.kill_rank())
            log(f"{run_folder.name}: kill {number} of {kills}: {found[-1].seconds:.2f} s to the next step")
        undisturbed, killed = [], []
        for number in range(kills if every else 0):
            watched.wait_until_ready("--standby" in command, kills + number + 1)
            undisturbed.append(watched.steps_within(every))
            killed.append(watched.steps_within(every, kill=True))
            log(f"{run_folder.name}: {undisturbed[-1]} steps in {every:g} s, {killed[-1]} with a kill")
        return Measured(found, undisturbed, killed)
    finally:
        watched.end()


@dataclass(frozen=True)
class _Run:
    folder: Path
    process: "subprocess.Popen[bytes]"
    output: Path
    ranks: int

    def steps(self) -> int:
        """Completed steps, repeated ones included."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def wait_until_ready(self, standby: bool, number: int) -> None:
        """Waits until the ranks have completed some steps since the last kill and, with --standby, spares are ready."""
        before = self.steps()
        self._wait(lambda: self.steps() >= before + STEPS_BETWEEN)
        if standby:
            self._wait(lambda: len(SPARES_READY.findall(self.output.read_bytes())) >= number)

    def memory(self) -> "RunMemory":
        from holdfast.snapshot.memory.run_memory import RunMemory

        return RunMemory.of(self.folder.resolve().name, self.folder)

    def end(self) -> None:
        """Ends all processes of the run and frees its memory. Nothing of it is needed on disk."""
        from holdfast.snapshot.keeper.status import discard

        self.process.kill()
        self.process.wait()
        memory = self.memory()
        for page in memory.pages().values():
            if page.owner_alive():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(page["process"], signal.SIGKILL)
        discard(memory)

    def steps_within(self, seconds: float, kill: bool = False) -> int:
        """Steps that the run gains in this time, repeated ones not included."""
        end, before, resumes = time.monotonic() + seconds, self._last_step(), self._resumes()
        if kill:
            os.kill(self._victim(), signal.SIGKILL)
        self._wait(lambda: time.monotonic() > end)
        gained = self._last_step() - before
        if kill:  # `end` finds ranks by their status pages, which they do not have while they import
            self._wait(lambda: self._resumes() > resumes)
        return gained

    def _last_step(self) -> int:
        return max(int(record["iteration"]) for record in read_journal(self.folder / "metrics.jsonl"))

    def _victim(self) -> int:
        pages = self.memory().pages()
        return int(pages[max(pages)]["process"])

    def kill_rank(self) -> Restart:
        before, began = self._resumes(), time.monotonic()
        os.kill(self._victim(), signal.SIGKILL)
        self._wait(lambda: self._resumes() > before)
        seconds = time.monotonic() - began
        return Restart(seconds, [e for e in read_journal(self.folder / "events.jsonl") if e["event"] == "resumed"][-1])

    def _resumes(self) -> int:
        return sum(event["event"] == "resumed" for event in read_journal(self.folder / "events.jsonl"))

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                end = self.output.read_bytes().decode(errors="replace")[-500:]
                raise HoldfastError(f"the run of the bench ended or made no step for {START_SECONDS:.0f} s: {end}")
            time.sleep(POLL_SECONDS)


def _tables(measured: dict[str, Measured]) -> Tables:
    totals: list[Row] = []
    modes = {name: found.restarts for name, found in measured.items()}
    for name, restarts in modes.items():
        seconds = [restart.seconds for restart in restarts]
        spread = f"{min(seconds):.2f}–{max(seconds):.2f}"
        totals.append(
            {"mode": name, "kills": len(restarts), "median s": statistics.median(seconds), "fastest to slowest": spread}
        )
    parts: list[Row] = []
    for part in dict.fromkeys(part for restarts in modes.values() for restart in restarts for part in _parts(restart)):
        medians = {
            f"{name} s": statistics.median(_parts(restart).get(part, 0.0) for restart in restarts)
            for name, restarts in modes.items()
        }
        parts.append({"part": part, **medians})
    gained: list[Row] = [
        {
            "mode": name,
            "steps": sum(found.undisturbed),
            "steps with kills": sum(found.killed),
            "ratio": sum(found.killed) / max(1, sum(found.undisturbed)),
        }
        for name, found in measured.items()
        if found.killed
    ]
    return {
        "kill -9 of a rank to the next completed step": totals,
        "Where the time goes (medians)": parts,
        **({"Steps gained in equal times, without and with a kill": gained} if gained else {}),
    }


def _parts(restart: Restart) -> dict[str, float]:
    noticed = restart.seconds - restart.resumed["seconds_since_failure"]
    return {"notice the failure": noticed, **restart.resumed["timeline"]}
