"""The fork server and the supervisor's side of it, with real processes that are not ranks."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from holdfast.system.processes import start_time
from holdfast.train import forked_ranks
from holdfast.train.fork_server import FORK
from holdfast.train.forked_ranks import ForkServer
from tests.train.test_standby import wait_for

# The server without torch. A rank writes what it is to the file OUT, and then exits with the code or waits for a signal.
SERVER = """
import json, os, stat, sys, threading, time
from holdfast.train import fork_server
import holdfast.train.__main__ as rank

def is_socket(n):
    try:
        return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError:
        return False

def run_rank():
    found = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "session": os.getsid(0),
             "environment": dict(os.environ),
             "sockets": [n for n in range(3, 64) if is_socket(n)]}
    with open(os.environ["OUT"] + ".new", "w") as file:
        json.dump(found, file)
    os.rename(file.name, os.environ["OUT"])
    if "CODE" in os.environ:
        sys.exit(int(os.environ["CODE"]))
    time.sleep(600)

def imports():
    if "THREAD" in os.environ:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

rank.main = run_rank
fork_server.import_all = imports
fork_server.main()
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RANK_LOGS", str(tmp_path))
    found = ForkServer([sys.executable, "-c", SERVER], tmp_path)
    yield found
    found.close()


def process_of(server: ForkServer) -> int:
    assert server._process is not None
    return server._process.pid


def test_forked_ranks_are_children_with_their_own_group_and_environment(server, tmp_path, monkeypatch):
    server.start()
    server.wait_until_ready()
    monkeypatch.setenv("SET_AFTER_THE_START", "1")
    ranks = [server.start_rank({"OUT": str(tmp_path / f"rank-{rank}"), "RANK": str(rank)}) for rank in range(2)]
    for number, rank in enumerate(ranks):
        assert rank is not None and rank.poll() is None
        out = tmp_path / f"rank-{number}"
        wait_for(out.exists, "rank")
        found = json.loads(out.read_text())
        assert (found["pid"], found["parent"], found["group"]) == (rank.pid, os.getpid(), rank.pid)
        assert found["session"] not in (os.getsid(0), os.getsid(process_of(server)))
        assert found["environment"]["RANK"] == str(number) and found["environment"]["SET_AFTER_THE_START"] == "1"
        assert found["sockets"] == []  # none of the server or of the other rank
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[0].wait(0.01)
    os.killpg(ranks[0].pid, signal.SIGKILL)
    assert ranks[0].wait(60) == -signal.SIGKILL and ranks[1].poll() is None
    os.killpg(ranks[1].pid, signal.SIGTERM)
    assert ranks[1].wait(60) == -signal.SIGTERM
    last = server.start_rank({"OUT": str(tmp_path / "last"), "CODE": "3"})
    assert last is not None and last.wait(60) == 3


def test_a_forked_process_without_an_environment_ends_and_does_nothing(server, tmp_path, monkeypatch):
    """As when the supervisor does not get the answer in time, and starts the rank as a new process."""
    monkeypatch.setenv("OUT", str(tmp_path / "rank"))
    server.start()
    server.wait_until_ready()
    ours, theirs = socket.socketpair()
    with ours, theirs, forked_ranks._reparents_here():
        socket.send_fds(server._control, [FORK], [theirs.fileno()])
        process = server._read_process()
    assert forked_ranks.ForkedProcess(process).wait(60) == 0
    assert not (tmp_path / "rank").exists()


def test_a_server_that_does_not_answer_or_has_ended_forks_nothing(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forked_ranks, "FORK_SECONDS", 0.5)
    monkeypatch.setattr(forked_ranks, "REPLACE_SECONDS", 0.0)
    assert server.start_rank({}) is None  # not started
    server.start()
    server.wait_until_ready()
    stopped = process_of(server)
    os.kill(stopped, signal.SIGSTOP)
    assert server.start_rank({"OUT": str(tmp_path / "rank")}) is None
    assert not start_time(stopped) and "did not fork a rank: timed out" in capsys.readouterr().err
    monkeypatch.setattr(forked_ranks, "FORK_SECONDS", 60.0)
    server.keep()  # replaces it
    server.wait_until_ready()
    killed = process_of(server)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not start_time(killed), "end of the server")
    assert server.start_rank({"OUT": str(tmp_path / "rank")}) is None
    server.keep()
    server.wait_until_ready()
    last = server.start_rank({"OUT": str(tmp_path / "rank"), "CODE": "0"})
    assert last is not None and last.wait(60) == 0
    assert json.loads((tmp_path / "rank").read_text())["pid"] == last.pid


def test_a_server_that_cannot_be_started_forks_nothing(tmp_path, capsys):
    server = ForkServer([str(tmp_path / "missing")], tmp_path)
    server.start()
    server.wait_until_ready()
    assert server.start_rank({}) is None
    assert "the fork server cannot be started" in capsys.readouterr().err


def test_a_server_whose_imports_started_a_thread_forks_nothing_and_is_not_replaced(server, monkeypatch, capsys):
    monkeypatch.setenv("THREAD", "1")
    monkeypatch.setattr(forked_ranks, "REPLACE_SECONDS", 0.0)
    server.start()
    server.wait_until_ready()
    assert server.start_rank({}) is None
    server.keep()
    assert server._process is None
    assert "ranks cannot be forked: the imports started 1 more threads" in capsys.readouterr().err


def test_the_server_ends_when_the_supervisor_is_killed(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom holdfast.train.forked_ranks import ForkServer\n"
        f"server = ForkServer([sys.executable, '-c', {SERVER!r}], Path({str(tmp_path)!r}))\n"
        "server.start()\nserver.wait_until_ready()\nprint(server._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "HOLDFAST_RANK_LOGS": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.kill()
    wait_for(lambda: not start_time(server), "end of the server")


@pytest.mark.slow
def test_the_real_imports_leave_a_process_that_can_be_forked(tmp_path):
    """With several cores numpy's OpenBLAS would start threads; CUDA must not be initialized."""
    script = "from holdfast.train import fork_server as s; s.import_all(); print(s.unsafe_to_fork())"
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout == "None\n", done
