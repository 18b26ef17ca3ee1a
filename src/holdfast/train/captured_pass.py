"""Forward and backward of one micro batch as a CUDA graph: the host launches one graph instead of some thousand kernels.

The graph reads its inputs from fixed buffers and writes the gradients to fixed addresses, which become `.grad` after every
replay; where a step has several micro batches it adds to them. It keeps the memory of one micro batch's activations, which the
pass needs anyway. Only a pass without collectives and without dropout is captured: nothing in it may depend on the host.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from holdfast.models.products import refresh_copies

EAGER_STEPS = 2
"""Steps that run kernel by kernel first: kernels are compiled and workspaces allocated outside the graph. The first step scales
fp8 in another way than those after it."""
Inputs = dict[str, Tensor]


class CapturedPass:
    """`run(inputs)` computes a result and adds to the gradients of `parameters` from tensors on the device."""

    def __init__(
        self, run: Callable[[Inputs], Tensor], parameters: list[nn.Parameter], example: Inputs, accumulates: bool
    ) -> None:
        self._parameters, self._accumulates = parameters, accumulates
        self._inputs = {name: tensor.clone() for name, tensor in example.items()}
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if accumulates else None
        refresh_copies(parameters)  # so that the graph reads the copies
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # thread_local: calls of other threads, such as the snapshot copy's, do not invalidate the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = run(self._inputs)
        self._gradients = [parameter.grad for parameter in parameters]

    def takes(self, batch: Sequence[Inputs]) -> bool:
        """Whether the micro batches have the names, shapes and number that were captured."""
        known = {name: tensor.shape for name, tensor in self._inputs.items()}
        alike = all(known == {name: tensor.shape for name, tensor in inputs.items()} for inputs in batch)
        return alike and (self._accumulates or len(batch) == 1)

    def replay(self, batch: Sequence[Inputs]) -> Tensor:
        """The sum of the results; afterwards `.grad` holds the sum of the gradients."""
        refresh_copies(self._parameters)  # a rewind changes the weights, but not the addresses that the graph reads
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if self._accumulates:
            torch._foreach_zero_([gradient for gradient in self._gradients if gradient is not None])
        results = []
        for inputs in batch:
            for name, tensor in inputs.items():
                self._inputs[name].copy_(tensor, non_blocking=True)
            self._graph.replay()
            results.append(self._result.clone())
        return torch.stack(results).sum(0)
