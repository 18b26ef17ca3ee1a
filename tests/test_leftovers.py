"""What a test started ends with the process that ran the test, however that ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SESSION = """
import os, pathlib, signal, subprocess, time, pytest

@pytest.fixture
def daemon():
    # Its own session, its parent gone at once, as slurmctld, munged and keepers.
    start = "import os, sys; os.setsid(); os.fork() or os.execvp('sleep', ['sleep', '600'])"
    subprocess.run(["python3", "-c", start], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield

def test_dies(daemon):
    pathlib.Path("mark").write_text(os.environ["HOLDFAST_TEST_SESSION"])
    if os.environ["END"] == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif os.environ["END"]:
        os.kill(os.getpid(), getattr(signal, os.environ["END"]))
"""


def carrying(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOLDFAST_TEST_SESSION={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("end", "options", "code"),
    [
        pytest.param("", [], 0, id="the session ends well"),
        pytest.param("SIGKILL", [], -9, id="the session is killed"),
        pytest.param("SIGILL", [], -4, id="the session meets an illegal instruction"),
        pytest.param("SIGKILL", ["-n1", "--max-worker-restart=0"], 1, id="a worker is killed"),
        pytest.param("parent", ["-n1"], -9, id="the controller of the workers is killed"),
    ],
)
def test_a_daemon_ends_with_the_test_process_that_started_it(tmp_path, end, options, code):
    (tmp_path / "test_session.py").write_text(SESSION)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "END": end}
    done = subprocess.run([*command, "test_session.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    mark = (tmp_path / "mark").read_text()
    assert mark.startswith(os.environ["HOLDFAST_TEST_SESSION"] + "/")
    deadline = time.monotonic() + 60
    while left := carrying(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
