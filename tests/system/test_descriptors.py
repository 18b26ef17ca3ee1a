"""Descriptors: no byte is dropped in silence, and private files are private."""

import os
import resource
import signal
import stat

import pytest

from holdfast.system.descriptors import open_private, pwrite_all, write_all


@pytest.mark.parametrize("write", [write_all, lambda descriptor, content: pwrite_all(descriptor, content, 0)])
def test_a_write_that_the_kernel_cuts_short_is_an_error(tmp_path, write):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(OSError, match="File too large"):
            write(descriptor, b"x" * 150)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert os.fstat(descriptor).st_size == 100
        write(descriptor, b"y" * 150)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes().endswith(b"y" * 150)


def test_a_private_file_is_the_owners_alone_and_never_a_link(tmp_path):
    with open(tmp_path / "private", "xb", opener=open_private) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "private")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", os.O_RDWR)
