"""Muon for the matrices of the layers, AdamW for everything else (embeddings, norms, biases, output).

Muon's step is the momentum of the gradient with its singular values brought near one, by Newton-Schulz iterations. That needs
whole matrices: a rank that holds a shard gathers the others, computes the same whole update as they do, and applies its part.
The step of a matrix is scaled to the size of AdamW's steps, so that one learning rate serves both.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.parallel.tensor import local

# The quintic polynomial that torch.optim.Muon uses: steepest at zero, not converging to exactly one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
# Root mean square of AdamW's typical step.
ADAMW_RMS = 0.2


def orthogonalize(matrix: Tensor, iterations: int) -> Tensor:
    """The matrix with its singular values brought near one. In bf16 on CUDA."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.clone()
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.AdamW):
    """Groups with `muon` true get Muon's step, the others AdamW's. State of a matrix: momentum_buffer.

    `grad_scale` and `found_inf`, where set, mean what they mean to AdamW's fused kernels: the gradients are divided by the
    first, and nothing changes where the second is not zero. The host does not wait for either.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        iterations: int = 5,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum, self._iterations = momentum, iterations

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        every = self.param_groups
        for group in every:
            if group.get("muon"):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_matrix(group, parameter)
        self.param_groups = [group for group in every if not group.get("muon")]
        try:
            loss: float | None = super().step(closure)
        finally:
            self.param_groups = every
        return loss

    def _step_matrix(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, value, gradient = local(state["momentum_buffer"]), local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale.to(gradient.dtype)
        moved = buffer.lerp(gradient, 1 - self._momentum)
        direction = orthogonalize(_whole(gradient.lerp(moved, self._momentum), parameter), self._iterations)
        lr = float(group["lr"])
        size = ADAMW_RMS * math.sqrt(max(parameter.shape))
        stepped = value * (1 - lr * group["weight_decay"]) - lr * size * _part(direction, parameter)
        if self.found_inf is not None:
            finite = self.found_inf == 0
            moved, stepped = torch.where(finite, moved, buffer), torch.where(finite, stepped, value)
        buffer.copy_(moved)
        value.copy_(stepped)


def _whole(shard: Tensor, parameter: Tensor) -> Tensor:
    """The whole matrix of which each rank holds the shard that it holds of `parameter`."""
    if not isinstance(parameter, DTensor):
        return shard
    spread: Any = torch.empty_like(parameter)
    local(spread).copy_(shard)
    whole: Tensor = spread.full_tensor()
    return whole


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole matrix, as `parameter` is sharded."""
    if not isinstance(parameter, DTensor):
        return whole
    return local(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
