"""Ranks that are forked from a process which has imported everything: kills of each kind of process, and nothing left behind."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.snapshot.keeper.status import kill_keeper
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.system.journal import read_journal
from holdfast.system.processes import start_time
from tests.corpus import write_dataset
from tests.distributed.test_kill import command, ranks_of
from tests.train.test_standby import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# As sitecustomize.py: the server takes long to import.
SLOW_IMPORTS = """
import sys, time
if "holdfast.train.fork_server" in sys.orig_argv:
    time.sleep(600)
"""

# As sitecustomize.py: a rank dies as soon as the server has forked it.
BROKEN_FORK = """
import os, signal, sys
forks = 0
def after_fork():
    global forks
    forks += 1
    if forks == 2 and "holdfast.train.fork_server" in sys.orig_argv:
        os.kill(os.getpid(), signal.SIGKILL)
os.register_at_fork(after_in_child=after_fork)
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


def customized(folder: Path, code: str) -> str:
    """PYTHONPATH with a sitecustomize.py of this code."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


class Run:
    """A run of two ranks, a process of its own."""

    def __init__(self, prefix: Path, save: Path, steps: int, environment: dict[str, str] | None = None) -> None:
        self.save, self.output = save, save.with_suffix(".log")
        line = command(prefix, save, steps, "--max-restarts", "5")
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                line, stdout=stream, stderr=stream, env={**os.environ, **(environment or {})}
            )

    def wait(self, condition, what: str) -> None:
        wait_for(lambda: condition() or self.process.poll() is not None, what, 180)
        assert self.process.poll() is None, self.output.read_text()

    def resumed(self) -> int:
        return sum(event["event"] == "resumed" for event in read_journal(self.save / "events.jsonl"))

    def steps(self) -> int:
        return len(list(read_journal(self.save / "metrics.jsonl")))

    def ranks(self) -> list[int]:
        """Both ranks, after some more steps."""
        before = self.steps()
        self.wait(lambda: self.steps() >= before + 5 and len(ranks_of(self.save)) == 2, "steps")
        return ranks_of(self.save)

    def children(self) -> dict[int, bytes]:
        """Child of the supervisor → the module that it was started with."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
        return {pid: found[3] for pid, found in words.items() if len(found) > 3}  # a process that has ended has none

    def server(self) -> int:
        forking = [pid for pid, module in self.children().items() if module == b"holdfast.train.fork_server"]
        (server,) = set(forking) - set(ranks_of(self.save))
        return server


@pytest.fixture
def start(prefix, tmp_path):
    started: list[Run] = []

    def run(steps: int, **environment: str) -> Run:
        started.append(Run(prefix, tmp_path / "run", steps, environment))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()
        for rank in ranks_of(one.save):
            os.kill(rank, signal.SIGKILL)
        memory = RunMemory.of(one.save.name, one.save)
        if memory.path.exists():
            kill_keeper(memory)
            with memory.locked():
                memory.free()


def test_killed_ranks_are_forked_again_and_without_the_server_new_processes_take_over(start):
    run = start(1_000_000)
    seen: set[int] = set()
    for number in (1, 2):
        ranks, server = run.ranks(), run.server()
        assert {run.children()[rank] for rank in ranks} == {b"holdfast.train.fork_server"}
        assert not seen & set(ranks)
        seen |= {*ranks, server}
        os.kill(ranks[number - 1], signal.SIGKILL)
        run.wait(lambda expected=number: run.resumed() == expected, "resume")
    ranks = run.ranks()
    assert run.server() == server
    run.process.send_signal(signal.SIGSTOP)  # it sees both at once: it would replace the server between the two
    os.kill(server, signal.SIGKILL)
    os.kill(ranks[0], signal.SIGKILL)
    run.process.send_signal(signal.SIGCONT)
    run.wait(lambda: run.resumed() == 3, "resume")
    last = run.ranks()
    assert {run.children()[rank] for rank in last} == {b"holdfast.train"}
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(120) == 0, run.output.read_text()
    assert "Traceback" not in run.output.read_text()
    assert not [process for process in (*seen, *ranks, *last) if start_time(process)]


def test_ranks_start_again_after_the_folder_for_temporary_files_was_emptied(start, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    run = start(1_000_000, TMPDIR=str(folder))
    ranks = run.ranks()
    shutil.rmtree(folder)
    folder.mkdir()
    os.kill(ranks[0], signal.SIGKILL)
    run.wait(lambda: run.resumed() == 1, "resume")
    run.ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(120) == 0, run.output.read_text()


def test_the_server_ends_with_a_killed_supervisor_and_the_ranks_go_on(start):
    run = start(1_000_000)
    ranks, server = run.ranks(), run.server()
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not start_time(server), "end of the server")
    assert all(start_time(rank) for rank in ranks)


def test_a_run_whose_forked_ranks_do_not_live_goes_on_in_new_processes(start, tmp_path):
    run = start(10, PYTHONPATH=customized(tmp_path / "broken", BROKEN_FORK))
    assert run.process.wait(300) == 0, run.output.read_text()
    text = run.output.read_text()
    assert text.count("failed: killed by SIGKILL") == 1 and text.count("no rank is forked from now on") == 1
    assert "finished after step 10" in text


def test_a_signal_during_the_imports_of_the_server_ends_the_run_as_at_any_other_time(start, tmp_path):
    run = start(10, PYTHONPATH=customized(tmp_path / "slow", SLOW_IMPORTS))
    run.wait(lambda: b"holdfast.train.fork_server" in run.children().values(), "server")
    (server,) = run.children()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(120) == 0, run.output.read_text()
    assert "stopped by SIGTERM; the same command continues from" in run.output.read_text()
    assert not start_time(server)
