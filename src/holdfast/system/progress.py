"""Progress on stderr: a bar on a terminal, a plain line every ten seconds elsewhere.

With several ranks on a node only local rank 0 prints.
"""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_LINE_SECONDS = 10.0
LEAST_BAR_COLUMNS = 70


class Bar:
    """Counts progress and shows nothing; the bars that show something derive from it."""

    def advance(self, amount: float = 1) -> None: ...

    def skip(self, amount: float) -> None:
        """Counts what was done before this process began: the rate does not include it."""

    def note(self, text: str) -> None: ...

    def total(self, amount: float) -> None: ...


def should_log() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("SLURM_LOCALID", "0") == "0"


_copies: list[TextIO] = []


def copy_lines_to(stream: TextIO) -> None:
    """Makes `log` print to this stream too: the terminal, for a process whose stderr is redirected to a file."""
    _copies.append(stream)


def log(message: str, *, short: str | None = None) -> None:
    """Prints a line on stderr; a terminal gets `short` where it is given. Ignores write errors: a full log disk must not
    stop the job."""
    if should_log():
        for stream in (sys.stderr, *_copies):
            with contextlib.suppress(OSError):
                # In one write: a Ctrl-C between the text and the line break would join two lines.
                stream.write(f"{short if short is not None and stream.isatty() else message}\n")
                stream.flush()


def count_of(number: int, noun: str) -> str:
    """A number with its noun, singular or plural: `1 bad line`, `2 bad lines`, `3 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def short_number(value: float) -> str:
    """A number of at most five characters: 812, 20.7k, 1.2M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return f"{value:.0f}"


def clock_time(seconds: float) -> str:
    """H:MM:SS, or days and hours."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h" if days else f"{hours}:{minutes:02d}:{whole:02d}"


@contextmanager
def progress(title: str, total: float | None = None, unit: str = "B") -> Iterator[Bar]:
    """A bar over `total` units (`B` counts bytes in MB/s; any other unit is shown as its name)."""
    if not should_log():
        yield Bar()
    elif sys.stderr.isatty():
        with _terminal_bar(title, total, unit) as bar:
            yield bar
    else:
        plain = _PlainBar(title, total, unit)
        yield plain
        plain.finish()


class _PlainBar(Bar):
    """Prints a line every ten seconds; nothing for work that ends sooner."""

    def __init__(self, title: str, total: float | None, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done, self._before, self._note = 0.0, 0.0, ""
        self._start = self._last = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        if time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._line()

    def skip(self, amount: float) -> None:
        self._before += amount

    def note(self, text: str) -> None:
        self._note = text

    def total(self, amount: float) -> None:
        self._total = amount

    def finish(self) -> None:
        if self._last != self._start:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        scale, unit = (1e6, "MB") if self._unit == "B" else (1, self._unit)
        done = self._before + self._done
        share = f" of {self._total / scale:,.0f}" if self._total else ""
        rate = self._done / max(self._last - self._start, 1e-9)
        left = ""
        if self._total and rate > 0 and self._total > done:
            left = f", {datetime.timedelta(seconds=round((self._total - done) / rate))} left"
        line = f"{self._title}: {done / scale:,.0f}{share} {unit}, {rate / scale:,.1f} {unit}/s{left} {self._note}"
        log(line.rstrip())


@contextmanager
def _terminal_bar(title: str, total: float | None, unit: str) -> Iterator[Bar]:
    # rich takes 70 ms to import: only a process that shows a bar imports it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn("[bold]{task.description}")]
    if console.width < LEAST_BAR_COLUMNS:  # rich would break each column into lines
        columns += [TaskProgressColumn(), TimeRemainingColumn()]
    else:
        amount = [DownloadColumn(), TransferSpeedColumn()] if unit == "B" else [MofNCompleteColumn(), TextColumn(unit)]
        columns += [BarColumn(), *amount, TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task(title, total=total, note="")

        class TerminalBar(Bar):
            def advance(self, amount: float = 1) -> None:
                display.advance(task, amount)

            def skip(self, amount: float) -> None:
                display.tasks[0].completed += amount

            def note(self, text: str) -> None:
                display.update(task, note=text)

            def total(self, amount: float) -> None:
                display.update(task, total=amount)

        yield TerminalBar()
