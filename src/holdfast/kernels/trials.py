"""Kernels that compute the same are compared: their results, and how long they take on a GPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REPLAYS = 3
TOLERANCE = 0.05
"""Relative error of a result beside another one: about five times what bf16 rounds."""


def milliseconds(action: Callable[[], object]) -> float:
    """Time of an action on the device, with the waits between its kernels."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    action()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def kernel_milliseconds(action: Callable[[], object]) -> float:
    """The same without the time that the host takes to launch the kernels: they are recorded as a CUDA graph. Call the action
    before, so that nothing is compiled while it is recorded."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        action()
    graph.replay()
    return min(milliseconds(graph.replay) for _ in range(REPLAYS))


def agree(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether the tensors are equal within the rounding of a 16-bit compute type."""
    return all(relative_error(one, right) <= TOLERANCE for one, right in zip(found, wanted, strict=True))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
