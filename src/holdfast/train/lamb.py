"""LAMB: Adam's direction, with the length of each parameter's step scaled by the norm of the parameter.

The details are those of NVIDIA's BERT recipe: moments with bias correction; decoupled decay added to the direction before its
norm is taken; a step of `lr × direction × |parameter| / |direction|`, or `lr × direction` where either norm is zero or where a
group has no decay. Clip gradients by the global norm before the step: that is the recipe's pre-normalization. Norms are those of
whole parameters, also where a rank holds a shard of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.parallel.tensor import local


def sum_over_shards(squares: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Sums the squared norms [n] of shards over the ranks that hold the other shards of the same parameters.

    The parameters' placements give these ranks, so that all of them join the same all-reduces. A plain tensor needs none.
    """
    groups: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                # not isinstance(Shard): rows sharded by tensor parallelism and by FSDP2 have a placement class of their own
                if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
                    group = parameter.device_mesh.get_group(axis)
                    groups.setdefault((axis, id(group)), (group, []))[1].append(index)
    for group, indices in groups.values():
        selected = squares[indices]
        dist.all_reduce(selected, group=group)
        squares[indices] = selected
    return squares


class Lamb(torch.optim.Optimizer):
    """LAMB over multi-tensor kernels. State per parameter: exp_avg, exp_avg_sq, step, with the names of torch's AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in by_kind.values():
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        values = [local(p) for p in parameters]
        directions = _adam_directions(group, gradients, states)
        if group["weight_decay"] != 0:
            torch._foreach_add_(directions, values, alpha=group["weight_decay"])
            torch._foreach_mul_(directions, list(_trust_ratios(parameters, values, directions).unbind()))
        torch._foreach_add_(values, directions, alpha=-float(group["lr"]))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def _trust_ratios(parameters: list[Tensor], values: list[Tensor], directions: list[Tensor]) -> Tensor:
    """|parameter| / |direction| of each, 1 where one of the two is zero. One all-reduce for both norms."""
    squares = torch.cat([_squares(values), _squares(directions)])
    squares = sum_over_shards(squares, [*parameters, *parameters])
    value, direction = squares.sqrt().chunk(2)
    ratio = torch.where((value > 0) & (direction > 0), value / direction, torch.ones_like(value))
    return ratio.to(values[0].dtype)


def _adam_directions(group: dict[str, Any], gradients: list[Tensor], states: list[dict[str, Tensor]]) -> list[Tensor]:
    """Updates the moments; first moment / (root of second moment + eps), both bias-corrected."""
    beta1, beta2 = group["betas"]
    first = [local(state["exp_avg"]) for state in states]
    second = [local(state["exp_avg_sq"]) for state in states]
    torch._foreach_mul_(first, beta1)
    torch._foreach_add_(first, gradients, alpha=1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    roots = torch._foreach_sqrt(second)
    steps = [float(state["step"]) for state in states]
    torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(roots, group["eps"])
    directions = list(torch._foreach_div(first, roots))
    torch._foreach_div_(directions, [1 - beta1**step for step in steps])
    return directions


def _squares(tensors: list[Tensor]) -> Tensor:
    """Squared norms [n], in float32 at least."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square()
