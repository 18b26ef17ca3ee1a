"""A disk small enough to be filled: a tmpfs of a test's own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """`folder` on a disk of its own; skips where mounting is not for us."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        # Lazily: a keeper may hold a journal on it for a moment longer.
        subprocess.run(["umount", "--lazy", folder], check=True)
