"""Draws the panel at the bottom of the terminal, with the last log lines below it.

The supervisor's stderr, which the ranks inherit, becomes a pseudo terminal whose lines are read here. The invariants: every line
that would have been printed is printed, once and in order: the last lines are shown below the panel, and a line that leaves there
goes to the scrollback above it, at the end all of them; the terminal is in its usual mode at any time (no alternate screen, the
cursor visible), so that even a kill -9 leaves it usable; an error of the panel ends the panel and nothing else.
"""

import os
import queue
import select
import signal
import sys
import threading
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.config import Config
from holdfast.snapshot.report import size_text
from holdfast.system.progress import clock_time, short_number, should_log
from holdfast.train.panel.run_view import RunView
from holdfast.train.run_folder.events import describe_event, duration, last_failure

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

FRAME_SECONDS = 0.5
TAIL_LINES, KEPT_LINES = 8, 500
LEAST_ROWS, LEAST_COLUMNS, PANEL_COLUMNS = 16, 60, 120
LABEL_COLUMNS = 8
BLOCKS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_panel(config: Config, wanted: bool) -> Iterator[None]:
    """Shows the panel while the block runs, if a person looks at stderr: not under Slurm, not in the background of a shell. A
    run without --save has no files to read it from."""
    person = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "SLURM_JOB_ID" not in os.environ
    person = person and not in_background(2)
    if not (wanted and person and should_log() and config.train.save):
        yield
        return
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Ctrl-C between here and `try` would lose stderr
    panel = LivePanel(RunView(config))
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield
    finally:
        panel.close()


def in_background(terminal: int) -> bool:
    """Whether another process group has the terminal; False for a terminal that does not control this process."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:
        return False


class LivePanel:
    """Takes over stderr until `close`. One thread reads lines, another one draws."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing, self._read_all = threading.Event(), threading.Event()
        sys.stderr.flush()
        self._terminal = os.dup(2)
        self._reader, writer = os.openpty()
        tty.setraw(writer)
        os.dup2(writer, 2)
        os.close(writer)
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._draw)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Gives stderr back, after the last line that was written to it is printed."""
        with suppress(OSError):
            sys.stderr.flush()
        os.dup2(self._terminal, 2)
        self._closing.set()
        for thread in self._threads:
            thread.join()
        os.close(self._reader)
        os.close(self._terminal)

    def _read(self) -> None:
        """Reads lines until the panel closes and nothing is left. Never waits for the terminal: ranks must not wait for it."""
        rest = b""
        while True:
            closing = self._closing.is_set()
            ready, _, _ = select.select([self._reader], [], [], 0.05)
            try:
                content = os.read(self._reader, 1 << 16) if ready else b""
            except OSError:  # EIO: no process has the other end open
                content = b""
                if not closing:
                    time.sleep(0.05)
            *lines, rest = (rest + content).split(b"\n")
            for line in lines:
                self._lines.put(line.decode(errors="replace"))
            if closing and not content:
                break
        if rest:
            self._lines.put(rest.decode(errors="replace"))
        self._read_all.set()

    def _draw(self) -> None:
        try:
            Screen(self._terminal, self._view, self._lines).run(self._read_all)
        except Exception as error:  # a closed terminal, or a defect: the lines are printed without a panel
            self._lines.put(f"warning: the panel ended: {type(error).__name__}: {error}")
            while not (self._read_all.wait(0.1) and self._lines.empty()):
                with suppress(queue.Empty, OSError):
                    while True:
                        os.write(self._terminal, self._lines.get_nowait().encode() + b"\n")


class Screen:
    """The drawing thread's view of the terminal."""

    def __init__(self, terminal: int, view: RunView, lines: "queue.SimpleQueue[str]") -> None:
        self._view, self._lines, self._terminal = view, lines, terminal
        self._file = os.fdopen(os.dup(terminal), "w", errors="replace")
        self._console = self._new_console()
        self._tail: deque[str] = deque()
        self._printed: deque[str] = deque(maxlen=KEPT_LINES)

    def _new_console(self) -> "Console":
        from rich.console import Console

        return Console(file=self._file, force_terminal=True, highlight=False)

    def run(self, ended: threading.Event) -> None:
        """Draws until `ended`; while the run is in the background of a shell, only prints the lines."""
        while not ended.is_set():
            if in_background(self._terminal):
                self._scroll(0)
                ended.wait(FRAME_SECONDS)
            else:
                self._draw_frames(ended)
        self._scroll(0)

    def _draw_frames(self, ended: threading.Event) -> None:
        size = self._measure()
        live = self._start()
        try:
            while not ended.wait(FRAME_SECONDS):
                if in_background(self._terminal):
                    self._console = self._new_console()  # without the panel, whose place the shell has written to
                    return
                if self._measure() != size:  # the terminal has moved the lines of the last frame
                    live.stop()
                    live, size = self._redraw(), self._console.size
                self._view.read()
                self._scroll(self._tail_room())
                live.update(self._frame(), refresh=True)
        finally:
            if live.console is self._console:
                live.stop()

    def _measure(self) -> tuple[int, int]:
        """Sets the size of the console, which rich would take from the descriptors 0 to 2."""
        from rich.console import ConsoleDimensions

        columns, rows = os.get_terminal_size(self._terminal)
        self._console.size = ConsoleDimensions(columns or 80, rows or 24)
        return self._console.size

    def _start(self) -> "Live":
        from rich.live import Live

        live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        live.start()
        self._console.show_cursor(True)
        return live

    def _redraw(self) -> "Live":
        """Clears the terminal and prints the newest lines again."""
        self._console.clear()
        room = max(0, self._console.height - self._tail_room() - 11)
        for line in list(self._printed)[-room:] if room else []:
            self._print(line)
        return self._start()

    def _scroll(self, room: int) -> None:
        """Takes the new lines into the tail, and prints those that it has no room for above the panel."""
        with suppress(queue.Empty):
            while True:
                self._tail.append(self._lines.get_nowait())
        while len(self._tail) > room:
            line = self._tail.popleft()
            self._printed.append(line)
            self._print(line)

    def _print(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(visible(line)))

    def _tail_room(self) -> int:
        return max(0, min(TAIL_LINES, self._console.height - (5 if self._is_small() else 13)))

    def _is_small(self) -> bool:
        width, height = self._console.size
        return width < LEAST_COLUMNS or height < LEAST_ROWS

    def _frame(self) -> "RenderableType":
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        width = self._console.width
        tail = [Text(visible(line), no_wrap=True, overflow="ellipsis", style="dim") for line in self._tail]
        tail.append(Text())  # for the cursor: what is typed at the end of a full line would move all lines
        if self._is_small():
            return Group(Text(short_status(self._view), no_wrap=True, overflow="ellipsis", style="bold"), *tail)
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="cyan", no_wrap=True, width=LABEL_COLUMNS)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for label, text in panel_rows(self._view, min(width, PANEL_COLUMNS) - 16):
            table.add_row(label, Text(text, no_wrap=True, overflow="ellipsis"))
        alive = self._view.ranks_alive >= self._view.ranks_started or not self._view.records
        title = Text(visible(str(self._view.folder)), style="bold", overflow="ellipsis")
        border = "green" if alive else "red"
        return Group(
            Panel(table, title=title, title_align="left", border_style=border, width=min(width, PANEL_COLUMNS)), *tail
        )


def panel_rows(view: RunView, width: int) -> list[tuple[str, str]]:
    """(label, text) of each row; the bar and the sparkline fill the width."""
    last = view.last
    return [
        ("step", _step(view, width)),
        ("loss", _loss(view, width)),
        ("speed", _speed(last)),
        ("memory", f"{size_text(last['memory_bytes'])} peak of rank 0" if last.get("memory_bytes") else "–"),
        ("snapshot", _snapshot(view)),
        ("ranks", _ranks(view)),
        ("event", _event(view)),
    ]


def short_status(view: RunView) -> str:
    """One line for a terminal that is too small for the panel."""
    loss = view.last.get("loss")
    left = "" if view.seconds_left is None else f"  ETA {clock_time(view.seconds_left)}"
    return (
        f"step {view.last.get('iteration', 0):,}  {view.share:.0%}  loss {'–' if loss is None else f'{loss:.4f}'}{left}"
    )


def _step(view: RunView, width: int) -> str:
    if not view.records:
        return f"waiting for the first step, {duration(round(time.time() - view.started))} so far"
    total = f"/{view.iterations:,}" if view.iterations else ""
    text = f"{view.last['iteration']:,}{total}  {view.share:.1%}"
    left = f"ETA {clock_time(view.seconds_left)}" if view.seconds_left is not None else ""
    room = max(0, width - len(text) - len(left) - 6)
    filled = round(room * view.share)
    return f"{text}  {'━' * filled}{'╌' * (room - filled)}  {left}"


def _loss(view: RunView, width: int) -> str:
    if not view.records:
        return "–"
    loss = view.last.get("loss")
    text = "not finite" if loss is None else f"{loss:.4f}"
    validation = "" if view.validation_loss is None else f"validation {view.validation_loss:.4f}"
    losses = [record["loss"] for record in view.records if record.get("loss") is not None]
    return f"{text:<10}  {sparkline(losses, max(8, width - 36))}  {validation}"


def _speed(last: dict[str, float]) -> str:
    if not last.get("tokens_per_s"):
        return "–"
    mfu = f"MFU {last['mfu']:.1%}" if last.get("mfu") is not None else f"{last.get('tflops', 0):.3g} TFLOP/s per rank"
    return f"{short_number(last['tokens_per_s'])} tok/s  {last.get('step_ms', 0):,.1f} ms per step  {mfu}"


def _snapshot(view: RunView) -> str:
    if view.snapshot_step < 0:
        return "none yet"
    parts = [f"step {view.snapshot_step:,} in memory, {duration(round(view.snapshot_age, 1))} old"]
    if view.last.get("snapshot_stall_ms") is not None:
        parts.append(f"stall {view.last['snapshot_stall_ms']:.2f} ms")
    return ", ".join(parts) + (f"; step {view.saved_step:,} on disk" if view.saved_step is not None else "")


def _ranks(view: RunView) -> str:
    phases = f": {', '.join(sorted(view.phases))}" if view.phases else ""
    restarts = f"; restart {view.restarts}" if view.restarts else ""
    return f"{view.ranks_alive} of {view.ranks_started} alive{phases}{restarts}"


def _event(view: RunView) -> str:
    if not view.events:
        return "–"
    event = view.events[-1]
    if event["event"] == "failure":  # ranks that lost their connection to the failed one are recorded after it
        failed = last_failure(list(view.events))
        event = failed[0] if failed else event
    ago = duration(round(max(0.0, time.time() - float(event["time"]))))
    return f"{ago} ago: {describe_event(event).text}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of blocks, at most `width` of them, each the mean of its share."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((mean - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for mean in means)


def visible(line: str) -> str:
    """The line without characters that control the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line.expandtabs().rstrip("\r"))
