"""Makes the standard streams safe to use whatever the caller gave: closed descriptors, or a locale that lacks some characters."""

import codecs
import os
import sys
from typing import TextIO


def prepare_standard_streams() -> None:
    """Called first. A closed descriptor leads to /dev/null: the next file that is opened would get its number, and what a library
    prints would go into that file. Files and pipes get UTF-8; a terminal shows `?` for a character that it lacks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    _choose_encoding(sys.stdout)


def _choose_encoding(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)  # a stream of a test has none
    if reconfigure is None:
        return
    own = stream.isatty() or "PYTHONIOENCODING" in os.environ
    if own and codecs.lookup(stream.encoding).name != "utf-8":
        reconfigure(errors="replace")
    else:
        reconfigure(encoding="utf-8", errors="surrogateescape")  # names of files may hold other bytes
