"""`holdfast bench`: which measurements there are, and tables that can be read."""

import subprocess
import sys

import pytest

from holdfast.bench.harness import table
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


def test_a_table_has_a_column_for_every_key():
    shown = table([{"name": "a", "time": 1.23456}, {"name": "longer", "note": "x"}])
    assert shown.splitlines() == ["name    time   note", "a       1.235", "longer         x"]
