"""AdamW in one kernel launch that also writes the weights' copies in the compute type, so that no step casts them.

The state is that of torch.optim.AdamW (`step`, `exp_avg`, `exp_avg_sq` per parameter), so checkpoints fit both.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import kernels
from holdfast.models.products import refresh_copies

ALIGNMENT = 64  # elements: 128 bytes


class FusedAdamW(torch.optim.AdamW):
    """For plain fp32 parameters on one CUDA device. `grad_scale` (a divisor here) and `found_inf` as for torch's fused AdamW."""

    _addresses: Sequence[int] = ()
    _sizes: Sequence[int] = ()
    _table: Tensor
    _blocks: Tensor
    _decays: Tensor

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        from holdfast.kernels.adamw import adamw_step, address_table, block_map

        assert closure is None
        updated = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not updated:
            return
        device = updated[0][0].device
        states = [self._state_of(p) for p, _ in updated]
        skip = getattr(self, "found_inf", None)
        skip = torch.zeros((), device=device) if skip is None else skip
        divisor = getattr(self, "grad_scale", None)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0 - skip)
        refresh_copies(self._parameters())  # the kernel writes them too, but not in a step that it skips
        copies = [getattr(p, "compute_copy", None) for p, _ in updated]
        tensors = [
            (p, _aligned(p.grad), state["exp_avg"], state["exp_avg_sq"], copy)
            for (p, _), state, copy in zip(updated, states, copies, strict=True)
        ]
        addresses = [part.data_ptr() for parts in tensors for part in parts if part is not None]
        if addresses != self._addresses:  # gradients are allocated for every step, mostly at the same places
            sizes = [p.numel() for p, _ in updated]
            self._addresses, self._table = addresses, address_table(tensors, device)
            self._blocks = block_map(sizes, device) if sizes != self._sizes else self._blocks
            self._decays = torch.tensor([group["weight_decay"] for _, group in updated]).to(device)
            self._sizes = sizes
        group = updated[0][1]
        adamw_step(
            self._table,
            self._decays,
            self._blocks,
            divisor=torch.ones((), device=device) if divisor is None else divisor,
            skip=skip,
            corrections=_corrections(steps[0], group["betas"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            copy_dtype=next((copy.dtype for copy in copies if copy is not None), torch.bfloat16),
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


def _aligned(gradient: Tensor) -> Tensor:
    """The gradient at an address that the kernel takes: torch aligns tensors, but a gradient may be a part of one."""
    return gradient if gradient.data_ptr() % 16 == 0 and gradient.is_contiguous() else gradient.contiguous().clone()


def _corrections(step: Tensor, betas: tuple[float, float]) -> Tensor:
    """1 - betaⁿ for both, computed in fp64."""
    powers = [torch.pow(beta, step.double()) for beta in betas]
    return (1.0 - torch.stack(powers)).float()
