"""A real Slurm for the tests: four virtual nodes on this machine, started once for the session and stopped at its end."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "slurm_lab"
WAIT_SECONDS = 240.0


class Lab:
    """The virtual cluster: runs commands against it and waits for its jobs, at most WAIT_SECONDS."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "LAB": str(folder),
            "PORT": str(port),
            # A job's number gives its rendezvous port: two clusters on one machine must not count from the same number.
            "FIRST_JOB": str(random.randrange(1, 50_000)),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def up(self) -> subprocess.CompletedProcess[str]:
        """Starts what is not running, and restarts nodes that a test took down."""
        return self.script("up.sh")

    def script(self, name: str) -> subprocess.CompletedProcess[str]:
        # Daemons inherit the streams: a pipe would never end, a file does.
        log = self.folder.with_suffix(f".{name}.log")
        with log.open("w") as output:
            done = subprocess.run([SCRIPTS / name], env=self.environment, stdout=output, stderr=output, timeout=300)
        text = log.read_text()
        log.unlink()
        return subprocess.CompletedProcess(done.args, done.returncode, text, "")

    def run(
        self, *command: str | Path, check: bool = True, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.environment, **environment},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def holdfast(
        self, *arguments: str | Path, check: bool = True, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "holdfast.cli", *arguments, check=check, cwd=cwd, **environment)

    def field(self, job: str, name: str) -> str:
        shown = self.run("scontrol", "show", "job", "-o", job, check=False).stdout
        return next((word.split("=", 1)[1] for word in shown.split() if word.startswith(f"{name}=")), "")

    def states(self, job: str) -> list[str]:
        """State of the job, or of each task of an array that has been split off."""
        shown = self.run("scontrol", "show", "job", "-o", job, check=False).stdout
        return [word.split("=", 1)[1] for word in shown.split() if word.startswith("JobState=")]

    def wait(self, what: str, condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        """Waits until the condition holds; fails with the cluster's state and logs after the limit."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"no {what} within {seconds:.0f} s\n{self.diagnosis()}")
            time.sleep(0.1)

    def wait_for_end(self, job: str, state: str = "COMPLETED", log: Path | None = None) -> None:
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
        self.wait(f"end of job {job}", lambda: (s := self.states(job)) and set(s) <= ended)
        shown = f"\n{log.read_text()}" if log and log.exists() else ""
        assert set(self.states(job)) == {state}, f"{self.states(job)}\n{self.diagnosis()}{shown}"

    def pids_on(self, node: str) -> list[int]:
        """The processes of the node: its slurmd, its step daemons and their tasks."""
        inside = self.namespace(int((self.folder / f"{node}.pid").read_text()))
        return [int(p.name) for p in Path("/proc").glob("[0-9]*") if self.namespace(int(p.name)) == inside]

    @staticmethod
    def namespace(process: int) -> str:
        try:
            return os.readlink(f"/proc/{process}/ns/uts")
        except OSError:
            return ""

    def kill_node(self, node: str) -> None:
        """Kills every process of the node at once; some end by themselves meanwhile."""
        for process in self.pids_on(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    @property
    def has_namespaces(self) -> bool:
        return "NAMESPACES=1" in (self.folder / "env.sh").read_text()

    @property
    def has_pyxis(self) -> bool:
        return bool((self.folder / "plugstack.conf").read_text())

    def diagnosis(self) -> str:
        parts = [self.run(*command, check=False).stdout for command in (("squeue",), ("sinfo", "-N"))]
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join([*parts, *(f"--- {log.name}\n{tail(log, 12)}" for log in logs)])


def tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def free_ports(count: int) -> int:
    """The first of `count` unused ports in a row, outside of the ranges of rendezvous ports (20000 and up) and of the kernel."""
    for _ in range(200):
        first = random.randrange(11000, 20000 - count)
        if all(is_free(first + offset) for offset in range(count)):
            return first
    raise RuntimeError("no free range of ports")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    """The cluster itself; tests use `lab`, which also restarts nodes that the test took down."""
    lab = Lab(Path(tempfile.mkdtemp(prefix="holdfast-slurm-")), free_ports(100))
    try:
        started = lab.up()
        if started.returncode:
            pytest.skip(f"no Slurm here: {started.stdout.strip().splitlines()[-1]}")
        yield lab
    finally:
        lab.script("down.sh")
        shutil.rmtree(lab.folder, ignore_errors=True)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    left = cluster.run("squeue", "-h", "-o", "%A", check=False).stdout.split()
    if left:
        cluster.run("scancel", *set(left), check=False)
    started = cluster.up()
    assert started.returncode == 0, started.stdout


@pytest.fixture
def shared(cluster: Lab) -> Iterator[Path]:
    """A folder that every virtual node sees, as a cluster's file system would be."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir=cluster.folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def read_json_lines(path: Path) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
