"""Runs a command and draws what it prints as an animated SVG: each line appears when it was printed, long waits shortened.

    python docs/record_terminal.py docs/demo.svg "holdfast demo --fast" --leave-out "steps/s"

The text is the command's own; --leave-out drops lines, such as those that a progress bar would replace on a terminal.
The picture loads nothing, and is still where the reader prefers no motion.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

LONGEST_WAIT = 0.7  # seconds, of a wait in the animation
PADDING = 16
RED, GREEN, BLUE = (239, 106, 106), (63, 191, 143), (90, 159, 240)
THEME = TerminalTheme((29, 29, 27), (242, 242, 238), [(0, 0, 0), RED, GREEN, (0, 0, 0), BLUE, *[(0, 0, 0)] * 3])
COLOURS = {
    r"^\$ .*|^\d\. \w+( run)?:": "blue",
    r"killed rank.*": "red",
    r"resumed from memory[^:]*|bit-identical": "green",
}
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="{width} {height}" role="img">
<style>
text {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
{styles}
@media (prefers-reduced-motion: no-preference) {{ .line {{ opacity: 0; animation: show 0.1s forwards; }} }}
@keyframes show {{ to {{ opacity: 1; }} }}
</style>
<defs>{lines}</defs>
<rect x="-16" y="-16" width="100%" height="100%" rx="10" fill="#1d1d1b"/>
{backgrounds}{matrix}
</svg>
"""


def printed(command: str) -> list[tuple[float, str]]:
    """(seconds since the start, line) of everything that the command prints, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        start, found = time.monotonic(), [(0.0, f"$ {command}")]
        with subprocess.Popen(
            command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found.append((time.monotonic() - start, line.rstrip("\n")))
                print(line, end="", flush=True)
        if process.returncode:
            sys.exit(f"{command}: exit code {process.returncode}")
        return [(seconds, line.replace(folder, "~")) for seconds, line in found]


def drawn(lines: list[tuple[float, str]], width: int) -> str:
    """The lines as SVG, with an animation per row of the terminal."""
    console = Console(record=True, width=width, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    moments, moment, before = [], 0.0, 0.0
    for seconds, line in lines:
        moment, before = moment + min(seconds - before, LONGEST_WAIT), seconds
        text = Text(line)
        for pattern, colour in COLOURS.items():
            text.highlight_regex(pattern, colour)
        rows = text.wrap(console, width) or [Text("")]
        console.print(*rows, sep="\n", highlight=False)
        moments += [moment] * len(rows)
    svg = console.export_svg(theme=THEME, code_format=FORMAT)
    size = f"-{PADDING} -{PADDING} {12.2 * width + 2 * PADDING:.0f} {24.4 * len(moments) + 2 * PADDING:.0f}"
    svg = re.sub(r'viewBox="[^"]*"', f'viewBox="{size}"', svg)
    return re.sub(
        r'<text class="([^"]*)"([^>]*#[^)]*-line-(\d+)\))',
        lambda row: f'<text class="{row[1]} line" style="animation-delay:{moments[int(row[3])]:.1f}s"{row[2]}',
        svg,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("command")
    parser.add_argument("--columns", type=int, default=88)
    parser.add_argument("--leave-out", default="$^")
    options = parser.parse_args()
    lines = [entry for entry in printed(options.command) if not re.search(options.leave_out, entry[1])]
    picture = drawn(lines, options.columns)
    with open(options.output, "w") as file:
        file.write(picture)
