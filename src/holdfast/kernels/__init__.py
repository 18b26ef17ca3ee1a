"""Triton kernels for what torch leaves slow on a GPU: one file per operation.

`models/fused.py`, `models/loss.py` and `train/fused_adamw.py` use them. Nothing here knows modules, autograd or ranks: a
function takes and returns tensors. Column sums are accumulated in a fixed order, so that results repeat bit for bit.
"""

import functools
import importlib.metadata
import importlib.util


@functools.cache
def available() -> bool:
    """Whether Triton is installed (it comes with torch's CUDA builds)."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def installed(package: str) -> bool:
    """Whether an optional package, by the name that pip knows, is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
