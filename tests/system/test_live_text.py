"""The text of --watch: printed when it changes, shown in place on a terminal, and left there by Ctrl-C."""

import sys
import time

import pytest

from holdfast.cli import run
from holdfast.launch.command import status_text
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.live_text import watch_text
from tests.report.runs import write_run
from tests.tmux import TmuxScreen, needs_tmux


def wait_for(condition, screen=None):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, screen and screen.lines
        time.sleep(0.02)


def test_elsewhere_the_text_is_printed_when_it_changes(capsys):
    texts = iter(["one", "one", "two", "two", "one"])

    def render():
        try:
            return next(texts)
        except StopIteration:
            raise KeyboardInterrupt from None

    watch_text(render, seconds=0)
    assert capsys.readouterr().out == "one\n\ntwo\n\none\n"


def test_an_error_while_watching_is_shown_and_the_next_try_follows(capsys):
    answers = iter(["one", HoldfastError("the folder moved"), "two", KeyboardInterrupt()])

    def render():
        if isinstance(answer := next(answers), BaseException):
            raise answer
        return answer

    watch_text(render, seconds=0)
    assert capsys.readouterr().out == "one\n\none\n(it cannot be read now: the folder moved)\n\ntwo\n"


@needs_tmux
def test_a_terminal_shows_the_newest_text_and_keeps_it_after_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setenv("LINES", "24")  # some shells export the size that the terminal had
    monkeypatch.setenv("COLUMNS", "80")
    folder = write_run(tmp_path / "run")
    command = f"{sys.executable} -m holdfast.cli snapshots {folder} --watch"
    screen = TmuxScreen(tmp_path, ["sh", "-c", f"trap : INT; echo before; {command}; echo code $?; exec sleep 600"])
    try:
        wait_for(lambda: "disk: 2 checkpoints" in screen.lines)
        (folder / "checkpoints" / "step-00000100").rename(folder / "moved")
        wait_for(lambda: "disk: 1 checkpoint" in screen.lines)
        screen.tmux("resize-window", "-x", "60", "-y", "16")
        wait_for(
            lambda: (
                "".join(screen.lines[:1]).startswith("run run in ") and all(len(line) <= 60 for line in screen.lines)
            ),
            screen,
        )
        screen.tmux("send-keys", "C-c")
        wait_for(lambda: screen.history[-1:] == ["code 0"])
        assert screen.history[0] == "before" and screen.history.count("disk: 1 checkpoint") == 1
        assert screen.tmux("display-message", "-p", "#{cursor_flag} #{alternate_on}") == "1 0\n"
    finally:
        screen.close()


@pytest.mark.parametrize(
    "arguments",
    [["snapshots", "run", "--json"], ["snapshots", "run", "--verify"], ["launch", "status", "run", "--json"]],
)
def test_a_watched_text_is_neither_json_nor_verified(arguments):
    with pytest.raises(UsageError, match="--watch"):
        run([*arguments, "--watch"])


def test_the_state_of_jobs_is_one_line_each():
    job = {
        "script": "train.sbatch",
        "job": "7",
        "state": "RUNNING",
        "nodes": "n[1-2]",
        "time_left": "1:00",
        "restarts": 1,
        "detail": "",
    }
    found = {"jobs": [job], "iteration": 10, "loss": 2.5, "last_event": "started"}
    first, second = status_text(found).splitlines()
    assert first == "train.sbatch       job 7        RUNNING      nodes n[1-2], 1:00 left, 1 restart"
    assert second == "iteration 10, loss 2.5, last event: started"
