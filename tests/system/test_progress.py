"""Progress: a bar on a terminal; elsewhere a line now and then, with how far, how fast and how long still."""

import re
import sys
from pathlib import Path

import pytest

from holdfast.system import progress
from tests.tmux import TmuxScreen, needs_tmux
from tests.train.test_start import wait_for


def test_a_plain_line_has_the_rate_and_the_time_left_without_what_was_done_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0.0)
    clock = iter([100.0, 110.0, 110.0, 120.0, 120.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.progress("fetching a", 1000e6) as bar:
        bar.skip(400e6)
        bar.advance(10e6)
        bar.note("from a mirror")
        bar.advance(10e6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching a: 410 of 1,000 MB, 1.0 MB/s, 0:09:50 left"
    assert lines[1] == "fetching a: 420 of 1,000 MB, 1.0 MB/s, 0:09:40 left from a mirror"


def test_without_a_total_there_is_no_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0.0)
    with progress.progress("reading", unit="documents") as bar:
        bar.advance(3)
    assert re.match(r"reading: 3 documents, [\d,.]+ documents/s\n", capsys.readouterr().err)


BAR = """
import os, sys, time
while os.get_terminal_size().columns != int(sys.argv[1]):  # tmux resizes a little later
    time.sleep(0.01)
from holdfast.system.progress import progress
with progress("tokenizer train", 69e6) as bar:
    bar.advance(30e6)
    time.sleep(600)
"""


@needs_tmux
@pytest.mark.parametrize(("columns", "shown"), [(80, "30.0/69.0 MB"), (36, "43%")])
def test_the_bar_is_one_line_on_any_terminal(tmp_path: Path, columns: int, shown: str) -> None:
    screen = TmuxScreen(tmp_path, [sys.executable, "-c", BAR, str(columns)])
    try:
        screen.tmux("resize-window", "-x", str(columns), "-y", "20")
        wait_for(lambda: shown in "".join(screen.lines))
        (line,) = filter(None, screen.lines)
        assert line.startswith("tokenizer train ") and shown in line
    finally:
        screen.close()


def test_counts_agree_with_their_nouns() -> None:
    assert [progress.count_of(number, "bad line") for number in (0, 1, 2000)] == [
        "0 bad lines",
        "1 bad line",
        "2,000 bad lines",
    ]
    assert [progress.count_of(number, "micro batch") for number in (1, 3)] == ["1 micro batch", "3 micro batches"]
