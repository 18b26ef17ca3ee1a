"""Forward and backward of one micro batch as a CUDA graph: the host launches one graph instead of some thousand kernels.

The graph reads its inputs from fixed buffers and writes the gradients to fixed addresses, which become `.grad` after every
replay. It keeps the memory of one micro batch's activations, which the pass needs anyway. Only a pass without
collectives and without dropout is captured: nothing in it may depend on the host.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

EAGER_PASSES = 2
"""Passes that run kernel by kernel first: kernels are compiled and workspaces allocated outside the graph."""


class CapturedPass:
    """`run(inputs)` computes a result and the gradients of `parameters` from tensors on the device."""

    def __init__(
        self, run: Callable[[dict[str, Tensor]], Tensor], parameters: list[nn.Parameter], example: dict[str, Tensor]
    ) -> None:
        self._parameters = parameters
        self._inputs = {name: tensor.clone() for name, tensor in example.items()}
        for parameter in parameters:
            parameter.grad = None
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # thread_local: calls of other threads, such as the snapshot copy's, do not invalidate the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = run(self._inputs)
        self._gradients = [parameter.grad for parameter in parameters]

    def takes(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the inputs have the names and shapes that were captured."""
        known = {name: tensor.shape for name, tensor in self._inputs.items()}
        return known == {name: tensor.shape for name, tensor in inputs.items()}

    def replay(self, inputs: dict[str, Tensor]) -> Tensor:
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._result.clone()
