"""Appends a range of one file to another, inside the kernel where possible."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable

from holdfast.system.descriptors import write_all

COPY_BYTES = 64 << 20
FALLBACK_BYTES = 8 << 20
SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>


def append_file(
    source: int, destination: int, count: int, advance: Callable[[int], None] = lambda copied: None
) -> None:
    """Appends the first `count` bytes of `source` at the current position of `destination`."""
    start = 0
    while count:
        try:
            copied = os.copy_file_range(source, destination, min(count, COPY_BYTES), start)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
                raise
            copied = 0
        if not copied:
            # Some file systems return 0 where they should raise; reading distinguishes that from a short file.
            piece = os.pread(source, min(count, FALLBACK_BYTES), start)
            if not piece:
                raise EOFError(f"the file ends {count} bytes too early")
            write_all(destination, piece)
            copied = len(piece)
        start += copied
        count -= copied
        advance(copied)


def start_writeback(descriptor: int, start: int, count: int) -> None:
    """Makes the kernel start to write a stretch to the disk, so that the later sync waits for less. Errors are ignored: the
    sync reports them."""
    with contextlib.suppress(AttributeError):  # a C library without it
        libc = ctypes.CDLL(None)
        libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), SYNC_FILE_RANGE_WRITE)
