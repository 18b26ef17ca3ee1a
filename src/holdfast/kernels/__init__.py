"""Triton kernels for what torch leaves slow on a GPU: one file per operation, each beside the plain torch that it replaces.

A kernel is used where `models/fused.py` and `train/optim.py` choose it; `reference.py` holds the plain torch that the tests compare
with. Nothing here knows modules, autograd or ranks. Column sums are accumulated in a fixed order, so results repeat bit for bit.
"""

import functools
import importlib.util


@functools.cache
def available() -> bool:
    """Whether Triton is installed (it comes with torch's CUDA builds)."""
    return importlib.util.find_spec("triton") is not None
