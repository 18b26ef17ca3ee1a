"""`holdfast bench`: the list of measurements, and wrong usage."""

import subprocess
import sys

import pytest

from holdfast.cli import sub_verbs


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "holdfast.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_help_lists_every_bench():
    done = bench("--help")
    assert done.returncode == 0 and all(f"\n  {verb} " in done.stdout for verb in sub_verbs("bench"))


@pytest.mark.parametrize("arguments", [["no-such-bench"], ["fetch", "--no-such-flag"], ["fetch", "--against", "hope"]])
def test_wrong_usage_is_exit_code_2(arguments):
    done = bench(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
