"""A run folder has one owner: one of many simultaneous starts wins, and the claim ends with its holder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.system.errors import HoldfastError
from holdfast.system.run_claim import claim_run

HOLD = """
import sys, time
from holdfast.system.errors import HoldfastError
from holdfast.system.run_claim import claim_run
try:
    claim_run(sys.argv[1])
except HoldfastError as error:
    print(error, flush=True)
    sys.exit(1)
print("won", flush=True)
time.sleep(600)
"""


def start_holder(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_of_several_simultaneous_starts_wins_and_the_others_name_the_command(tmp_path):
    starts = [start_holder(tmp_path / "run") for _ in range(4)]
    try:
        lines = [first_line(start) for start in starts]
    finally:
        for start in starts:
            start.kill()
            start.wait()
    assert lines.count("won") == 1, lines
    for line in lines:
        assert line == "won" or f"holdfast persist {tmp_path / 'run'} --stop" in line


def test_a_killed_holder_is_succeeded_at_once_and_leaves_one_lease(tmp_path):
    holder = start_holder(tmp_path)
    assert first_line(holder) == "won"
    with pytest.raises(HoldfastError, match=f"process {holder.pid} on .* trains into it"):
        claim_run(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with claim_run(tmp_path):
        assert [path.name for path in (tmp_path / ".claim" / "node-0").iterdir()] == [".lease-000002"]
    claim_run(tmp_path).release()


def test_nodes_of_one_run_claim_their_own_number(tmp_path):
    with claim_run(tmp_path, "node-0"), claim_run(tmp_path, "node-1"), pytest.raises(HoldfastError, match="is in use"):
        claim_run(tmp_path, "node-1")


def of_another_host(run: Path) -> Path:
    """A claim whose holder cannot be looked up here; the path of its lease."""
    claim_run(run).release()
    (path,) = (run / ".claim" / "node-0").iterdir()
    lease = json.loads(path.read_bytes())
    path.write_text(json.dumps({**lease, "released": False, "holder": {**lease["holder"], "boot": "another"}}))
    return path


def test_a_silent_holder_on_another_host_is_succeeded_after_the_lease_time(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_LEASE_SECONDS", "0.5")
    of_another_host(tmp_path)
    claim_run(tmp_path).release()


def test_a_holder_on_another_host_that_shows_life_keeps_its_claim(tmp_path):
    path = of_another_host(tmp_path)
    beating = subprocess.Popen(
        [sys.executable, "-c", f"import os, time\nwhile True: os.utime({str(path)!r}); time.sleep(0.1)"]
    )
    try:
        with pytest.raises(HoldfastError, match="is in use"):
            claim_run(tmp_path)
    finally:
        beating.kill()
        beating.wait()


def test_a_holder_that_was_succeeded_is_stopped(tmp_path):
    code = HOLD.replace(
        "time.sleep(600)", "import signal\nsignal.sigwait({signal.SIGTERM})\nprint('stopped', flush=True)"
    )
    code = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n" + code
    environment = {**os.environ, "HOLDFAST_LEASE_SECONDS": "1"}
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert first_line(holder) == "won"
        folder = tmp_path / ".claim" / "node-0"
        (folder / ".lease-000002").write_bytes((folder / ".lease-000001").read_bytes())
        assert first_line(holder) == "stopped"
    finally:
        holder.kill()
        holder.wait()
