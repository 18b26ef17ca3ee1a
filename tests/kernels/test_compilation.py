"""The kernels compile for the GPUs that they are written for, also where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import kernels

# The kernels of training.
MODULES = [
    Path(kernels.__file__).with_name(f"{name}.py")
    for name in "activation activation_fp8 adamw attention column_sums cross_entropy fp8 fp8_weights norm short_attention".split()
]


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_for_hopper"]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    launched = {
        name
        for file in MODULES
        for name in re.findall(r"@triton\.jit\s+def (\w+)", file.read_text())
        if f"{name}[" in file.read_text()
    }
    assert launched and launched == set(done.stdout.split())
