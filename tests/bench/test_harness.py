"""The bench harness: turns, medians, ratios, processes and tables."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.bench.harness import installed, median, median_ratio, run_process, run_rounds, table
from holdfast.system.errors import HoldfastError


def test_contenders_take_turns_within_a_round(capsys):
    order: list[str] = []
    samples = run_rounds({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 3, "letters")
    assert order == list("ababab") and samples == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert capsys.readouterr().err.splitlines()[-1] == "letters: round 3 of 3 done"


def test_ratios_are_taken_within_a_round():
    slow_machine, quiet_machine = 10.0, 1.0
    ours, theirs = (
        [slow_machine, quiet_machine, quiet_machine],
        [2 * slow_machine, 2 * quiet_machine, 3 * quiet_machine],
    )
    assert median_ratio(theirs, ours, float) == 2 and median(theirs, float) == 3


def test_a_contender_that_fails_is_named_with_its_error():
    with pytest.raises(HoldfastError, match="tiktoken failed: no such corpus"):
        run_process("tiktoken", [sys.executable, "-c", "import sys; sys.exit('no such corpus')"])


def test_memory_is_that_of_a_process_and_its_descendants():
    child = "b = bytearray(80 << 20); import time; time.sleep(0.4)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_process("parent", [sys.executable, "-c", parent]).memory > 80 << 20


def test_an_interrupted_bench_ends_with_its_contender(tmp_path):
    started, command = (
        tmp_path / "pid",
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)",
    )
    bench = f"""
from holdfast.bench.harness import run_process
run_process("slow", {[sys.executable, "-c", command, str(started)]!r})
"""
    process = subprocess.Popen([sys.executable, "-c", bench], stderr=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: started.exists() and started.read_text())
    process.send_signal(signal.SIGINT)  # to the bench alone: its contender does not get it
    _, errors = process.communicate(timeout=60)
    assert errors.endswith(b"KeyboardInterrupt\n")
    assert not Path("/proc", started.read_text()).exists()


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_peers_that_are_not_installed_are_left_out_and_logged(capsys):
    assert installed({"here": "json.decoder", "gone": "no_such_module.part"}) == ["here"]
    assert capsys.readouterr().err == "gone is left out: no_such_module is not installed\n"


def test_a_table_has_a_column_for_every_key():
    shown = table([{"name": "a", "time": 1.23456}, {"name": "longer", "note": "x"}])
    assert shown.splitlines() == ["name    time   note", "a       1.235", "longer         x"]
