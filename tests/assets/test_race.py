"""The race itself: many real processes, one cache, and a server that counts."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.flockless import without_flock

TIME_LIMIT = 550


def run_race(ranks: int, iterations: int, strategy: str = "holdfast", **environment: str) -> dict:
    command = [sys.executable, "-m", "holdfast.cli", "fetch-storm", "--json", "--strategy", strategy]
    command += ["--ranks", str(ranks), "--iterations", str(iterations)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    lines = [line for line in done.stderr.splitlines() if line.startswith("Iteration ")]
    assert len(lines) == sum(len(one["downloads"]) for one in report["per_iteration"])
    return report


def assert_exactly_once(report: dict, iterations: int) -> None:
    assert len(report["per_iteration"]) == iterations
    for one in report["per_iteration"]:
        assert one["gets"] == {"gpt2-vocab.json": 1, "gpt2-merges.txt": 1}
        assert (one["failed_ranks"], one["wrong_bytes"]) == (0, 0)
        assert len(one["downloads"]) == 2


@pytest.mark.parametrize(
    ("ranks", "iterations"),
    [(64, 2), pytest.param(64, 10, marks=pytest.mark.slow), pytest.param(256, 1, marks=pytest.mark.slow)],
)
def test_many_processes_cause_one_download_per_file_and_no_failure(ranks, iterations):
    assert_exactly_once(run_race(ranks, iterations), iterations)


FLOCK_FILE_TWICE = """
import fcntl, os, sys
outcomes = []
for descriptor in [os.open(sys.argv[1], os.O_CREAT | os.O_RDWR) for _ in range(2)]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        outcomes.append(0)
    except OSError as error:
        outcomes.append(error.errno)
print(outcomes)
"""


@pytest.mark.parametrize("iterations", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [0, errno.ENOSYS, errno.ENOLCK], ids=["silent no-op", "ENOSYS", "ENOLCK"])
def test_it_holds_where_flock_does_not_work(mode, iterations, tmp_path):
    broken = without_flock(tmp_path, mode)
    command = [sys.executable, "-c", FLOCK_FILE_TWICE, str(tmp_path / "lock")]
    seen = subprocess.run(command, env=broken, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == f"[{mode}, {mode}]", "the shim is not in the way"
    assert_exactly_once(run_race(64, iterations, **broken), iterations)


def test_the_naive_way_shows_the_race():
    report = run_race(64, 2, "naive")
    assert all(one["gets"]["gpt2-vocab.json"] > 1 for one in report["per_iteration"])
    assert report["failed_ranks"] > 0
    assert report["gets"]["gpt2-vocab.json"] == sum(
        download["url"].endswith("vocab.json") for one in report["per_iteration"] for download in one["downloads"]
    )


def test_ctrl_c_ends_all_ranks_with_one_line():
    command = [sys.executable, "-m", "holdfast.cli", "fetch-storm", "--ranks", "8", "--iterations", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline().startswith("Iteration 1: ")  # and the next ranks are under way
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # all processes that hold the pipes have ended
    assert process.returncode == 130
    assert errors == "holdfast: error: interrupted; no partial output was left behind\n"
