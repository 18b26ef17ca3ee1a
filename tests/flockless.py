"""A file system without flock: a library, loaded in front of libc, that answers with the errno of $FLOCK_SHIM."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SHIM = """
#include <errno.h>
#include <stdlib.h>
int flock(int descriptor, int operation) {
    const char *mode = getenv("FLOCK_SHIM");
    if (mode == NULL || atoi(mode) == 0) return 0;
    errno = atoi(mode);
    return -1;
}
"""


def without_flock(folder: Path, code: int) -> dict[str, str]:
    """The environment in which flock fails with `code`; 0: it succeeds and excludes no other process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to build the flock shim with")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "FLOCK_SHIM": str(code)}
