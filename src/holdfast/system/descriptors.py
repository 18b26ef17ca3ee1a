"""File descriptors: write all of a buffer, open a file that only this user may read."""

import os
from pathlib import Path


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Writes everything at the current position; write(2) alone may write less."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def open_private(path: Path | str, flags: int) -> int:
    """Opens a file that is created for its owner alone; a symbolic link is refused. Usable as the `opener` of open()."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def pwrite_all(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """As `write_all`, at an offset."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
