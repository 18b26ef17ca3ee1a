"""The live panel: rows, the lines around it, resizing, and a terminal that is left as it was. tmux shows what a person sees."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config import Config
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.system.journal import Journal
from holdfast.train.panel.run_view import JournalTail, RunView
from holdfast.train.panel.screen import panel_rows, short_status, sparkline, visible
from tests.report.runs import START, record
from tests.tmux import TmuxScreen, needs_tmux
from tests.train.test_start import WAIT_SECONDS, command, prefix, wait_for  # noqa: F401

# Prints lines as the supervisor and its ranks do, waits for a file, and fails.
SCRIPT = """
import os, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
from holdfast.config import Config
from holdfast.train.panel.screen import live_panel
folder = Path(sys.argv[1])
config = replace(Config(), train=replace(Config().train, save=str(folder), train_iters=100))
print("before", file=sys.stderr)
try:
    with live_panel(config, wanted="--no-panel" not in sys.argv):
        for number in range(30):
            print(f"line {number:02d}.", file=sys.stderr)
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'of a rank, isatty %d' % os.isatty(2))"])
        print("\\nwide", "x" * 90, file=sys.stderr)
        while not (folder / "end").exists():
            time.sleep(0.02)
        print("last \\x1b[31mline", file=sys.stderr)
        raise ValueError("the error")
except ValueError as error:
    print(error, file=sys.stderr)
(folder / "ended").touch()
time.sleep(600)
"""


def has_panel(screen: TmuxScreen, width: int) -> bool:
    """Whether one whole panel of this width is on the screen, and nothing of another."""
    edges = [line for line in screen.lines if line[0:1] in ("╭", "╰")]
    return len(edges) == 2 and all(len(line) == width for line in edges)


@pytest.fixture
def run(tmp_path):
    """The folder of a run that is under way."""
    folder = tmp_path / "run"
    metrics, events = Journal(folder / "metrics.jsonl"), Journal(folder / "events.jsonl")
    for iteration in range(1, 51):
        metrics.write(record(iteration, time=time.time() + 60 + iteration, memory_bytes=5_000_000_000))
    events.write({"time": START, "event": "persisted", "step": 40, "path": "step-00000040"})
    events.event("failure", kind="exit", rank=1, cause="killed by SIGKILL")
    events.event("failure", kind="died", rank=0, cause="Connection reset by peer")
    (folder / "script.py").write_text(SCRIPT)
    return folder


def view_of(folder: Path) -> RunView:
    view = RunView(replace(Config(), train=replace(Config().train, save=str(folder), train_iters=100)))
    view.read()
    return view


def test_the_rows_show_progress_speed_snapshots_ranks_and_the_cause_of_the_last_failure(run):
    view = view_of(run)
    rows = dict(panel_rows(view, 64))
    assert rows["step"].startswith("50/100  50.0%  ━━━") and rows["step"].endswith("ETA 0:00:50")
    assert rows["loss"].startswith("4.4980 ") and len(rows["loss"]) <= 64
    assert rows["speed"].endswith("tok/s  138.4 ms per step  MFU 41.0%") and rows["memory"] == "5.0 GB peak of rank 0"
    assert rows["snapshot"] == "none yet" and rows["ranks"] == "0 of 1 alive"
    assert rows["event"].endswith("ago: rank 1 was killed by SIGKILL")
    assert short_status(view).startswith("step 50  50%  loss 4.4980")
    view.snapshot_step = 49
    assert dict(panel_rows(view, 64))["snapshot"].endswith("old, stall 0.37 ms; step 40 on disk")


def test_steps_that_are_computed_again_replace_the_first_ones(run):
    view = view_of(run)
    Journal(run / "metrics.jsonl").write(record(45, loss=None, validation_loss=4.5))
    view.read()
    assert [entry["iteration"] for entry in view.records][-2:] == [44, 45]
    assert (
        dict(panel_rows(view, 64))["loss"].startswith("not finite")
        and "validation 4.5000" in dict(panel_rows(view, 64))["loss"]
    )


def test_a_run_without_a_step_shows_that_it_waits(tmp_path):
    rows = dict(panel_rows(view_of(tmp_path), 64))
    assert rows["step"].startswith("waiting for the first step") and rows["loss"] == rows["event"] == "–"


def test_a_tail_reads_whole_lines_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = JournalTail(path)
    assert tail.new_records() == []
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n{"a": ')
    assert tail.new_records() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b"2}\n")
    assert tail.new_records() == [{"a": 2}] and tail.new_records() == []


def test_sparklines_and_control_characters():
    assert sparkline([1.0, 2.0, 3.0], 8) == "▁▅█" and sparkline(range(800), 8) == "▁▂▃▄▅▆▇█" and sparkline([], 8) == ""
    assert sparkline([5.0] * 3, 8) == "▁▁▁"
    assert visible("a\x1b[2J\tb\r") == "a?[2J   b"


@needs_tmux
def test_lines_scroll_above_the_panel_and_all_of_them_stay(run):
    screen = TmuxScreen(run, [sys.executable, str(run / "script.py"), str(run)])
    try:
        wait_for(lambda: has_panel(screen, 80) and "".join(screen.lines[-1:]).startswith("wide x"))
        lines = screen.lines
        assert "50/100" in "".join(lines) and lines[-2] == "of a rank, isatty 1" and len(lines[-1]) == 80
        screen.tmux("send-keys", "typed")  # the terminal shows it where the cursor is, and the next frame removes it
        wait_for(lambda: "typed" in "".join(screen.lines))
        wait_for(lambda: "typed" not in "".join(screen.lines))
        assert has_panel(screen, 80), screen.lines
        assert [line for line in screen.history if line.startswith("line ")] == [
            f"line {number:02d}." for number in range(30)
        ]
        assert screen.history[0] == "before"
        for columns, rows in ((200, 50), (80, 24), (61, 16)):
            screen.tmux("resize-window", "-x", str(columns), "-y", str(rows))
            wait_for(lambda columns=columns: has_panel(screen, min(columns, 120)))
        screen.tmux("resize-window", "-x", "40", "-y", "10")
        wait_for(lambda: "╭" not in "".join(screen.lines) and "step 50  50%" in "".join(screen.lines))
        screen.tmux("resize-window", "-x", "80", "-y", "24")
        wait_for(lambda: has_panel(screen, 80))
        (run / "end").touch()
        wait_for((run / "ended").exists)
        assert screen.lines[-2:] == ["last ?[31mline", "the error"] and "╭" not in "".join(screen.lines)
        assert screen.tmux("display-message", "-p", "#{cursor_flag} #{alternate_on}") == "1 0\n"
    finally:
        screen.close()


@needs_tmux
def test_a_killed_panel_leaves_a_usable_terminal_and_no_panel_is_as_before(run):
    screen = TmuxScreen(
        run, ["sh", "-c", f"{sys.executable} {run}/script.py {run}; echo code $?; stty -a; exec sleep 600"]
    )
    try:
        wait_for(lambda: has_panel(screen, 80))
        (process,) = (int(child) for child in _children(int(screen.tmux("display-message", "-p", "#{pane_pid}"))))
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: "code 137" in screen.history)
        assert (
            " echo " in " ".join(screen.lines)
            and screen.tmux("display-message", "-p", "#{cursor_flag} #{alternate_on}") == "1 0\n"
        )
    finally:
        screen.close()
    (run / "end").touch()
    for flags in (["--no-panel"], []):  # stderr is a pipe: no panel either
        process = subprocess.Popen(
            [sys.executable, str(run / "script.py"), str(run), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for((run / "ended").exists)
        process.kill()
        (run / "ended").unlink()
        expected = [
            "before",
            *(f"line {number:02d}." for number in range(30)),
            "of a rank, isatty 0",
            f"wide {'x' * 90}",
            "last \x1b[31mline",
            "the error",
        ]
        assert process.communicate()[1].splitlines() == expected


@needs_tmux
def test_in_the_background_of_a_shell_the_lines_are_printed_alone(run):
    screen = TmuxScreen(run, ["env", "PS1=$ ", "bash", "--norc", "-i"])
    script = f"{sys.executable} {run}/script.py {run}"
    try:
        screen.tmux("send-keys", script, "Enter")
        wait_for(lambda: has_panel(screen, 80) and "".join(screen.lines[-1:]).startswith("wide x"))
        screen.tmux("send-keys", "C-z")
        wait_for(lambda: any("Stopped" in line for line in screen.lines))
        screen.tmux("send-keys", "clear; bg", "Enter")
        (run / "end").touch()
        wait_for(lambda: "the error" in screen.lines)
        assert "last ?[31mline" in screen.lines and "╭" not in "".join(screen.lines)
        screen.tmux("send-keys", "kill %1; clear", "Enter")
        (run / "end").unlink()
        screen.tmux("send-keys", f"{script} &", "Enter")
        wait_for(lambda: "of a rank, isatty 1" in screen.lines)
        assert "╭" not in "".join(screen.lines)
    finally:
        screen.close()


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@needs_tmux
@pytest.mark.slow
@pytest.mark.distributed
def test_a_real_run_shows_the_panel_survives_a_killed_rank_and_ctrl_c_leaves_a_clean_screen(prefix, tmp_path):  # noqa: F811
    save = tmp_path / "run"
    flags = ("--save", str(save), "--train-iters", "1000000", "--nproc-per-node", "2", "--log-interval", "5")
    screen = TmuxScreen(
        tmp_path, ["sh", "-c", f"trap : INT; {' '.join(command(prefix, *flags))}; echo code $?; exec sleep 600"]
    )
    try:
        wait_for(lambda: has_panel(screen, 80) and "2 of 2 alive: training" in "".join(screen.lines))
        os.kill(RunMemory.of(save.name, save).pages()[1]["process"], signal.SIGKILL)
        wait_for(lambda: any("rank 1 failed: killed by SIGKILL" in line for line in screen.history))
        wait_for(lambda: "restart 1" in "".join(screen.lines) and has_panel(screen, 80))
        screen.tmux("send-keys", "C-c")
        wait_for(lambda: "code 130" in screen.history)
        lines = screen.history
        assert lines[0].startswith("starting 2 ranks") and "╭" not in "".join(screen.lines)
        assert any(line.startswith("stopped by SIGINT; the same command continues") for line in lines)
        assert "Traceback" not in "\n".join(lines)
    finally:
        screen.close()
        deadline = time.monotonic() + WAIT_SECONDS
        while any(page.owner_alive() for page in _pages(save)):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _pages(save: Path):
    return RunMemory.of(save.name, save).pages().values()
