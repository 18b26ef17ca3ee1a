"""LAMB: Adam's direction, with the length of each parameter's step set by the length of the parameter itself.

The details are those of NVIDIA's BERT recipe: moments with bias correction; decoupled decay added to the direction before its
length is taken; a step of `lr × |parameter| / |direction|`, or plainly `lr × direction` where either length is zero or where a
group has no decay (`use_nvlamb` gives those a trust ratio too); optionally the gradient scaled down to a norm of at most
`max_grad_norm` first. Lengths are those of whole parameters, also where a rank holds a shard of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.parallel.tensor import local

ReduceSquares = Callable[[Tensor, Sequence[Tensor]], Tensor]


def sum_over_shards(squares: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Adds up the squared lengths [n] of shards over the ranks that hold the other shards of the same parameters.

    Which ranks these are is read from the parameters' placements, so that all of them take part in the same exchanges. A shard
    that is the whole, a plain tensor, needs none.
    """
    groups: dict[tuple[int, int], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                # not isinstance(Shard): rows cut twice, by tensor parallelism and FSDP2, are a kind of their own
                if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
                    group = parameter.device_mesh.get_group(axis)
                    groups.setdefault((axis, id(group)), (group, []))[1].append(index)
    for group, indices in groups.values():
        part = squares[indices]
        dist.all_reduce(part, group=group)
        squares[indices] = part
    return squares


class Lamb(torch.optim.Optimizer):
    """LAMB over multi-tensor kernels. State per parameter: exp_avg, exp_avg_sq, step, as torch's AdamW names them.

    `reduce_squares(squared lengths of shards, parameters)` gives the squared lengths of the whole parameters. `max_grad_norm`
    looks at the gradients of this optimizer's parameters; where a model's parameters are spread over pipeline stages, clip by the
    global norm before the step instead: it is the same arithmetic.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = None,
        use_nvlamb: bool = False,
        reduce_squares: ReduceSquares = sum_over_shards,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)
        self.max_grad_norm, self.reduce_squares = max_grad_norm, reduce_squares

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shrink = self._shrink()
        for group in self.param_groups:
            by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in by_kind.values():
                self._update(group, parameters, shrink)
        return loss

    def _shrink(self) -> Tensor | None:
        """What gradients are divided by, so that their norm is `max_grad_norm` at most."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_grad_norm is None or not parameters:
            return None
        squares = _squares([local(p.grad) for p in parameters])
        norm = self.reduce_squares(squares, parameters).sum().sqrt()
        return (norm / self.max_grad_norm).clamp(min=1.0)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], shrink: Tensor | None) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if shrink is not None:
            gradients = list(torch._foreach_div(gradients, shrink.to(gradients[0].dtype)))
        values = [local(p) for p in parameters]
        directions = _adam_directions(group, gradients, states)
        if group["weight_decay"] != 0:
            torch._foreach_add_(directions, values, alpha=group["weight_decay"])
        if group["weight_decay"] != 0 or group["use_nvlamb"]:
            ratios = self._trust_ratios(parameters, values, directions)
            torch._foreach_mul_(directions, list(ratios.unbind()))
        torch._foreach_add_(values, directions, alpha=-float(group["lr"]))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state

    def _trust_ratios(self, parameters: list[Tensor], values: list[Tensor], directions: list[Tensor]) -> Tensor:
        """|parameter| / |direction| for each of them, 1 where one of the two is zero. One exchange for both lengths."""
        squares = torch.cat([_squares(values), _squares(directions)])
        squares = self.reduce_squares(squares, [*parameters, *parameters])
        value, direction = squares.sqrt().chunk(2)
        ratio = torch.where((value > 0) & (direction > 0), value / direction, torch.ones_like(value))
        return ratio.to(values[0].dtype)


def _adam_directions(group: dict[str, Any], gradients: list[Tensor], states: list[dict[str, Tensor]]) -> list[Tensor]:
    """Moves the moments on, and gives first moment / (root of second moment + eps)."""
    beta1, beta2 = group["betas"]
    first = [local(state["exp_avg"]) for state in states]
    second = [local(state["exp_avg_sq"]) for state in states]
    torch._foreach_mul_(first, beta1)
    torch._foreach_add_(first, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    roots = torch._foreach_sqrt(second)
    steps = [float(state["step"]) for state in states]
    if group["bias_correction"]:
        torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(roots, group["eps"])
    directions = list(torch._foreach_div(first, roots))
    if group["bias_correction"]:
        torch._foreach_div_(directions, [1 - beta1**step for step in steps])
    return directions


def _squares(tensors: list[Tensor]) -> Tensor:
    """Squared lengths [n]; in float32 at least, whatever the tensors are."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square()
