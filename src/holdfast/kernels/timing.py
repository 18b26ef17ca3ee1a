"""How long work takes on a GPU."""

from collections.abc import Callable

import torch

REPLAYS = 3


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
