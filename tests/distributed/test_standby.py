"""Spare processes take over from ranks that are killed, and the run ends bit-identical; none of them outlives the run."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.system.journal import read_journal
from holdfast.system.processes import start_time
from tests.corpus import write_dataset
from tests.distributed.test_kill import assert_same_state, command, final_state, ranks_of, train
from tests.train.test_standby import wait_for

pytestmark = pytest.mark.distributed

# A step takes some 10 ms, and a busy machine must get to the kill before the run ends.
STEPS = 400


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


class StandbyRun:
    """A run with --standby, a process of its own."""

    def __init__(self, prefix: Path, save: Path, ranks: int, steps: int) -> None:
        flags = ("--nproc-per-node", str(ranks), "--standby", "--max-restarts", "5")
        self.save, self.output = save, save.with_suffix(".log")
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                command(prefix, save, steps, *flags), stdout=stream, stderr=stream, text=True
            )

    def text(self) -> str:
        return self.output.read_text()

    def children(self, module: str) -> list[int]:
        """The supervisor's children that run a module."""
        found = []
        for word in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                if module.encode() in Path(f"/proc/{word}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(word))
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        return ranks_of(self.save)

    def spares(self) -> list[int]:
        return [pid for pid in self.children("holdfast.train.spare") if pid not in self.ranks()]

    def pause_for_spares(self, announced: int) -> tuple[list[int], list[int]]:
        """Stops the ranks, which must not finish before, until it was announced so often that spares are ready; both."""
        wait_for(lambda: self.spares() or self.process.poll() is not None, "spare", 180)
        # Before the first snapshot is complete, a killed run begins again and has nothing to resume from.
        wait_for(lambda: re.search(r"iteration +3/", self.text()) or self.process.poll() is not None, "third step", 180)
        ranks = self.ranks()
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        wait_for(
            lambda: self.text().count(" ready") >= announced or self.process.poll() is not None, "ready spare", 180
        )
        return ranks, self.spares()

    def resumed(self) -> list[dict[str, object]]:
        return [event for event in read_journal(self.save / "events.jsonl") if event["event"] == "resumed"]

    def finish(self) -> None:
        self.process.wait(300)
        assert self.process.returncode == 0, self.text()


@pytest.fixture
def start(prefix, tmp_path):
    started: list[StandbyRun] = []

    def run(ranks: int, steps: int) -> StandbyRun:
        started.append(StandbyRun(prefix, tmp_path / "run", ranks, steps))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.slow
def test_a_spare_takes_over_and_the_run_ends_bit_identical(prefix, start, tmp_path):
    train(prefix, tmp_path / "undisturbed", STEPS, "--nproc-per-node", "1")
    run = start(1, STEPS)
    (rank,), (spare,) = run.pause_for_spares(1)
    os.kill(rank, signal.SIGKILL)
    run.finish()
    (resumed,) = run.resumed()
    assert resumed["source"] == "memory" and resumed["steps_lost"] <= 1
    assert f"process {spare}, restart 1" in (run.save / "logs" / "rank-0.log").read_text()
    assert float(str(resumed["seconds_since_failure"])) > 0 and "first step" in resumed["timeline"]
    assert_same_state(final_state(run.save), final_state(tmp_path / "undisturbed"))
    assert not start_time(spare)


@pytest.mark.slow
def test_two_kills_a_dead_spare_and_a_spare_killed_during_the_hand_over(prefix, start, tmp_path):
    train(prefix, tmp_path / "undisturbed", STEPS)
    run = start(2, STEPS)
    for number in (1, 2):
        ranks, spares = run.pause_for_spares(number)
        assert len(spares) == 2
        os.kill(ranks[number - 1], signal.SIGKILL)
        wait_for(lambda expected=number: len(run.resumed()) == expected, "resume", 120)
        assert sorted(run.ranks()) == sorted(spares)
    ranks, (victim, other) = run.pause_for_spares(3)
    os.kill(victim, signal.SIGKILL)  # replaced
    wait_for(lambda: run.text().count(" ready") >= 4, "another spare", 180)
    spares = run.spares()
    assert len(spares) == 2 and other in spares and victim not in spares
    first, second = sorted(spares, key=lambda spare: b"LOCAL_RANK=1" in Path(f"/proc/{spare}/environ").read_bytes())
    os.kill(first, signal.SIGSTOP)  # gets the job, before the second does, and does nothing with it
    os.kill(ranks[0], signal.SIGKILL)
    log = run.save / "logs" / "rank-1.log"
    wait_for(lambda: f"process {second}, restart 3" in log.read_text(), "second rank", 60)
    os.kill(first, signal.SIGKILL)
    run.finish()
    assert run.text().count(" failed: killed by SIGKILL") == 4
    assert_same_state(final_state(run.save), final_state(tmp_path / "undisturbed"))
    assert not any(start_time(process) for process in (*spares, victim, other))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_no_spare_outlives_its_supervisor(start, number, code):
    run = start(1, 100_000)
    wait_for(run.spares, "spare", 180)
    ranks, (spare,) = run.ranks(), run.spares()
    run.process.send_signal(number)
    assert run.process.wait(120) == code
    wait_for(lambda: not start_time(spare), "end of the spare")
    if number == signal.SIGKILL:  # ranks outlive their supervisor, as without --standby
        os.kill(ranks[0], signal.SIGKILL)
    assert "Traceback" not in run.text()
