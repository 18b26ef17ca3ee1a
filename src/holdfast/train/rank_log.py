"""A rank's output: everything goes to RUN/logs/rank-N.log, and the lines of `log` also to the terminal.

Native libraries (gloo, NCCL, oneDNN) write to the descriptors 1 and 2, so these are redirected before torch is imported. Each
start of the rank appends a header line and its output.
"""

import contextlib
import os
import time
from pathlib import Path

from holdfast.system.journal import tail_lines
from holdfast.system.progress import copy_lines_to

FOLDER_VARIABLE = "HOLDFAST_RANK_LOGS"
HEADER = "=== rank "
TAIL_BYTES = 1 << 16
SHOWN_LINES, SHOWN_COLUMNS = 5, 160


def rank_log(folder: Path, rank: int | str) -> Path:
    return folder / f"rank-{rank}.log"


def redirect_output() -> None:
    """Redirects this rank's stdout and stderr to its log. Does nothing if the supervisor set no folder or the disk is full."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    rank, restart = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    header = f"{HEADER}{rank}, process {os.getpid()}, restart {restart}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    try:
        descriptor = os.open(rank_log(Path(folder), rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return
    try:
        os.write(descriptor, header.encode())
    except OSError:
        os.close(descriptor)
        return
    copy_lines_to(os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace"))
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def open_helper_log(path: Path, name: str) -> int:
    """A descriptor for the output of a process that is not a rank yet: an emptied file, or nowhere if the disk is full."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.write(descriptor, f"=== {name}, process {os.getpid()}\n".encode())
    return descriptor


def last_lines(path: Path) -> list[str]:
    """The last lines of the newest start of a rank, without iteration lines, each shortened to SHOWN_COLUMNS."""
    text = b"\n".join(tail_lines(path, TAIL_BYTES)).decode(errors="replace")
    lines = text.rpartition(HEADER)[2].splitlines()[1:]
    lines = [line.rstrip() for line in lines if line.strip() and "] iteration " not in line]
    return [line if len(line) <= SHOWN_COLUMNS else line[: SHOWN_COLUMNS - 1] + "…" for line in lines[-SHOWN_LINES:]]
