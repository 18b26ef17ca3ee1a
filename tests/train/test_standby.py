"""The supervisor's side of spare processes and ranks, with real processes that are not ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from holdfast.system.processes import start_time
from holdfast.train import standby
from holdfast.train.rank_log import open_helper_log
from holdfast.train.rank_processes import RankProcesses
from holdfast.train.standby import Spares

# A spare without torch: says that it is ready, and writes the job that it gets, or "end", to a file.
SPARE = """
import os, socket, sys, time
channel = socket.socket(fileno=os.dup(0))
try:
    channel.sendall(b"ready")
    job = channel.makefile("rb").readline()
except OSError:
    job = b""
open(sys.argv[1] + os.environ["LOCAL_RANK"], "wb").write(job or b"end")
time.sleep(0 if not job else 600)
"""


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


@pytest.fixture
def spares(tmp_path):
    found = Spares([sys.executable, "-c", SPARE, str(tmp_path / "job-")], 2, tmp_path)
    yield found
    found.close()


def keep_until_ready(spares: Spares) -> None:
    def ready() -> bool:
        spares.keep()
        return spares.are_ready()

    wait_for(ready, "spare that is ready")


def test_a_ready_spare_becomes_the_rank_once(spares, tmp_path):
    assert spares.take(0, {"RANK": "0"}) is None  # there is none yet
    keep_until_ready(spares)
    before = spares.processes()
    process = spares.take(0, {"RANK": "6"})
    assert process is not None and process.pid == before[0]
    wait_for(lambda: (tmp_path / "job-0").exists() and (tmp_path / "job-0").read_bytes(), "job")
    assert (tmp_path / "job-0").read_bytes() == b'{"RANK": "6"}\n'
    assert spares.take(0, {"RANK": "6"}) is None
    keep_until_ready(spares)
    assert spares.processes()[1] == before[1] and spares.processes()[0] not in (before[0], before[1])
    process.kill()
    process.wait()


def test_a_spare_that_ended_is_not_used_and_is_replaced(spares, monkeypatch, capsys):
    monkeypatch.setattr(standby, "REPLACE_SECONDS", 0.01)
    spares._pause = 0.01
    keep_until_ready(spares)
    victim = spares.processes()[1]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not start_time(victim), "end of the spare")
    assert spares.take(1, {}) is None
    keep_until_ready(spares)
    assert spares.processes()[1] != victim
    assert "the spare of local rank 1 ended (killed by SIGKILL)" in capsys.readouterr().err


def test_a_spare_that_is_not_ready_is_not_used(tmp_path):
    spares = Spares([sys.executable, "-c", "import time; time.sleep(600)"], 1, tmp_path)
    try:
        spares.keep()
        assert spares.take(0, {}) is None and len(spares.processes()) == 1
    finally:
        processes = spares.processes()
        spares.close()
    assert not start_time(processes[0])


def test_spares_end_when_the_supervisor_is_killed(tmp_path):
    """The other end of the socket closes with the process that held it."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom holdfast.train.standby import Spares\n"
        f"spares = Spares([sys.executable, '-c', {SPARE!r}, {str(tmp_path / 'job-')!r}], 1, Path({str(tmp_path)!r}))\n"
        "while not spares.are_ready(): spares.keep(); time.sleep(0.01)\n"
        "print(spares.processes()[0], flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        spare = int(supervisor.stdout.readline())
        supervisor.kill()
    wait_for(lambda: not start_time(spare), "end of the spare")
    assert (tmp_path / "job-0").read_bytes() == b"end"


def test_when_a_rank_fails_the_others_are_killed_at_once_and_not_reported(tmp_path):
    """Without a SIGTERM first: a rank that hangs in a collective handles none, and 30 seconds would pass. The rank that is
    killed has begun to write its error file."""
    script = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        f"mark = Path({str(tmp_path)!r}, 'mark')\n"
        "if os.environ['RANK'] == '1':\n    while not mark.exists(): time.sleep(0.01)\n    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: mark.with_name('asked').touch())\n"
        "Path(os.environ['TORCHELASTIC_ERROR_FILE']).touch()\nmark.touch()\n"
        "while True: time.sleep(1)\n"
    )
    shared = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    environments = {rank: {"RANK": str(rank), **shared} for rank in range(2)}
    ranks = RankProcesses((sys.executable, "-c", script), environments, DefaultLogsSpecs(log_dir=str(tmp_path)))
    ranks.start()
    processes = ranks.pids()
    result = None
    while result is None:
        ranks.wait_for_end(1.0)
        result = ranks.wait(0)
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: 3}
    assert not (tmp_path / "asked").exists()
    assert not any(start_time(process) for process in processes.values())


@pytest.mark.parametrize("dies", [True, False], ids=["a rank that dies", "a rank that hangs"])
def test_the_rank_that_broke_a_connection_is_the_cause_even_if_it_ends_later(tmp_path, dies):
    """A killed process closes its connections before its parent can see its end."""
    script = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '1':\n"
        "    Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text('{\"message\": \"Connection closed by peer\"}')\n"
        "    sys.exit(1)\n"
        f"time.sleep({0.3 if dies else 600})\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    shared = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    environments = {rank: {"RANK": str(rank), **shared} for rank in range(2)}
    ranks = RankProcesses((sys.executable, "-c", script), environments, DefaultLogsSpecs(log_dir=str(tmp_path)))
    ranks.start()
    result = None
    while result is None:
        ranks.wait_for_end(1.0)
        result = ranks.wait(0)
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == ({0: -9, 1: 1} if dies else {1: 1})


def test_a_spare_that_cannot_be_started_is_reported_and_tried_again_later(tmp_path, capsys):
    """As when there is no memory or no process left: the ranks go on."""
    spares = Spares([str(tmp_path / "missing")], 2, tmp_path)
    spares.keep()
    spares.keep()
    assert spares.processes() == {} and spares.take(0, {}) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "the spare of local rank 0 cannot be started" in line and line.endswith("starting another in 1 s")


def test_a_helper_whose_log_cannot_be_opened_writes_nowhere(tmp_path):
    descriptor = open_helper_log(tmp_path / "missing" / "spare-0.log", "spare")
    assert os.write(descriptor, b"anything") and os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
    os.close(descriptor)
    os.close(open_helper_log(tmp_path / "spare-0.log", "spare"))
    assert (tmp_path / "spare-0.log").read_text() == f"=== spare, process {os.getpid()}\n"
