"""The text of a verb with --watch: shown in place on a terminal, printed each time it changes elsewhere, until Ctrl-C."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.system.errors import HoldfastError


def watch_text(render: Callable[[], str], seconds: float = 1.0) -> None:
    """Calls `render` again and again, `seconds` apart. At Ctrl-C the newest text stays on the terminal."""
    text = render()

    def newest() -> str:
        """What is watched changes while it is read: an error after the first time is shown, and the next try follows."""
        try:
            return render()
        except (HoldfastError, OSError) as error:
            return f"{text}\n(it cannot be read now: {error})"

    with suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            text = _on_terminal(newest, text, seconds)
        else:
            _print_changes(newest, text, seconds)
    if sys.stdout.isatty():
        print(text)


def _print_changes(render: Callable[[], str], text: str, seconds: float) -> None:
    print(f"{text}\n", end="", flush=True)  # one write, which Ctrl-C does not divide
    while True:
        time.sleep(seconds)
        if (newest := render()) != text:
            text = newest
            print(f"\n{text}\n", end="", flush=True)


def _on_terminal(render: Callable[[], str], text: str, seconds: float) -> str:
    """Fills the screen as top(1) does, which stays correct when the terminal changes its size; returns the newest text."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    for fixed in ("LINES", "COLUMNS"):  # rich would take them for the size, also after the terminal has another one
        os.environ.pop(fixed, None)

    def shown(content: str) -> Text:
        return Text(content, no_wrap=True, overflow="ellipsis")

    with suppress(KeyboardInterrupt), Live(shown(text), console=Console(), screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            time.sleep(seconds)
            text = render()
            live.update(shown(text), refresh=True)
    return text
