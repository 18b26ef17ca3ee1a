"""AdamW in two kernel launches that also write the weights' copies in the compute type, so that no step casts them.

The state is that of torch.optim.AdamW (`step`, `exp_avg`, `exp_avg_sq` per parameter), so checkpoints fit both. The `step` of
all parameters are views of one tensor.
"""

import itertools
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast import kernels
from holdfast.models.products import refresh_copies

ALIGNMENT = 64  # elements: 128 bytes
NOT_CLIPPED = (None, 0.0, 1.0)


class _Plan(NamedTuple):
    """What a step needs, as long as its tensors stay where they are."""

    parameters: list[nn.Parameter]
    """Those that have a gradient."""
    places: list[int]
    """The addresses of all parameters and gradients, 0 where there is none. The gradients themselves may go with their step."""
    moments: list[Tensor]
    decays: list[float]
    table: Tensor
    table_decays: Tensor
    blocks: Tensor
    steps: Tensor
    numbers: Tensor
    copy_dtype: torch.dtype


class FusedAdamW(torch.optim.AdamW):
    """For plain fp32 parameters on one CUDA device."""

    _plan: _Plan | None = None
    _clip: tuple[Tensor | None, float, float] = NOT_CLIPPED

    @staticmethod
    def takes(parameters: Iterable[nn.Parameter]) -> bool:
        plain = all(type(p) is nn.Parameter and p.is_cuda and p.dtype == torch.float32 for p in parameters)
        return plain and kernels.available()

    def write_copies(self, dtype: torch.dtype) -> None:
        """Give every parameter a copy in the compute type; each step keeps it equal to the parameter."""
        parameters = self._parameters()
        # One buffer, aligned copy after copy: matrices of one layer that follow each other can be read as one.
        starts = [0, *itertools.accumulate(-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters)]
        buffer = torch.empty(starts[-1], dtype=dtype, device=parameters[0].device)
        for parameter, start in zip(parameters, starts, strict=False):
            parameter.compute_copy = buffer[start : start + parameter.numel()].view_as(parameter)  # type: ignore[attr-defined]
            parameter.copied_version = -1  # type: ignore[attr-defined]
        refresh_copies(parameters)
        self._plan = None

    def clip_next(self, norm: Tensor, clip: float, scale: float) -> None:
        """The next step uses gradient / scale, clipped to a norm of `clip` unless that is 0. It changes nothing if `norm`, that
        of gradient / scale, is not finite."""
        self._clip = (norm, clip, scale)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        from holdfast.kernels.adamw import adamw_step, begin_step

        assert closure is None
        (norm, clip, scale), self._clip = self._clip, NOT_CLIPPED
        gradients = [p.grad if p.grad is None else _aligned(p.grad) for p in self._parameters()]
        plan, group = self._current_plan(gradients), self.param_groups[0]
        if plan is None:
            return
        refresh_copies(plan.parameters)  # the kernel writes them too, but not in a step that it skips
        norm = torch.zeros((), device=plan.steps.device) if norm is None else norm
        begin_step(norm, plan.steps, plan.numbers, clip, scale, group["betas"])
        rates = float(group["lr"]), group["betas"], group["eps"]
        adamw_step(plan.table, plan.table_decays, plan.blocks, plan.numbers, *rates, plan.copy_dtype)

    def _current_plan(self, gradients: list[Tensor | None]) -> _Plan | None:
        """The last step's plan where gradients and state are at the same places; else a new one."""
        plan, parameters = self._plan, self._parameters()
        places = [0 if tensor is None else tensor.data_ptr() for tensor in (*parameters, *gradients)]
        decays = [group["weight_decay"] for group in self.param_groups]
        if plan is not None and (plan.places, plan.decays) == (places, decays):
            moments = [self.state[p].get("exp_avg") for p in plan.parameters]
            if all(map(is_, moments, plan.moments)):
                return plan
        self._plan = self._new_plan(gradients, places, decays)
        return self._plan

    def _new_plan(self, gradients: list[Tensor | None], places: list[int], decays: list[float]) -> _Plan | None:
        from holdfast.kernels.adamw import address_table, block_map

        every = [(p, group["weight_decay"]) for group in self.param_groups for p in group["params"]]
        updated = [(p, decay, g) for (p, decay), g in zip(every, gradients, strict=True) if g is not None]
        if not updated:
            return None
        last, parameters = self._plan, [p for p, _, _ in updated]
        states = [self._state_of(p) for p in parameters]
        copies = [getattr(p, "compute_copy", None) for p in parameters]
        tensors = [
            (p, gradient, state["exp_avg"], state["exp_avg_sq"], copy)
            for (p, _, gradient), state, copy in zip(updated, states, copies, strict=True)
        ]
        device, sizes = parameters[0].device, [p.numel() for p in parameters]
        known = last is not None and [p.numel() for p in last.parameters] == sizes
        return _Plan(
            parameters,
            places,
            [state["exp_avg"] for state in states],
            decays,
            address_table(tensors, device),
            torch.tensor([decay for _, decay, _ in updated]).to(device),
            last.blocks if last is not None and known else block_map(sizes, device),
            _in_one_tensor(states),
            torch.zeros(4, device=device),
            next((copy.dtype for copy in copies if copy is not None), torch.bfloat16),
        )

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _in_one_tensor(states: list[dict[str, Tensor]]) -> Tensor:
    """The steps of all parameters as one tensor, of which each parameter's is a view; made if it is not so already."""
    first = states[0]["step"]
    addresses = [state["step"].data_ptr() for state in states]
    enough = first.untyped_storage().nbytes() >= 4 * (first.storage_offset() + len(states))
    if enough and addresses == list(range(addresses[0], addresses[0] + 4 * len(states), 4)):
        return first.as_strided((len(states),), (1,))
    steps = torch.stack([state["step"].float() for state in states])
    for state, step in zip(states, steps, strict=True):
        state["step"] = step
    return steps


def _aligned(gradient: Tensor) -> Tensor:
    """The gradient at an address that the kernel takes: torch aligns tensors, but a gradient may be a part of one."""
    return gradient if gradient.data_ptr() % 16 == 0 and gradient.is_contiguous() else gradient.contiguous().clone()
