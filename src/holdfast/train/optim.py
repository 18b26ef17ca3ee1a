"""The optimizer step: parameter groups, the global gradient norm, clipping, and the fp16 loss scale.

The gradient norm and the loss travel in one world-wide all-reduce. A parameter counts once, however many ranks hold it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.config import OptimizerConfig
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import is_sharded_over, local
from holdfast.train.fused_adamw import FusedAdamW
from holdfast.train.lamb import Lamb


def build_optimizer(stages: list[nn.Module], options: OptimizerConfig, compute: torch.dtype) -> torch.optim.Optimizer:
    """AdamW or LAMB over four groups: with and without decay, sharded and plain (fused kernels take one kind at a time)."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for stage in stages:
        for parameter in stage.parameters():
            decays, sharded = parameter.ndim >= 2, isinstance(parameter, DTensor)
            groups.setdefault((decays, sharded), []).append(parameter)
    every = [parameter for parameters in groups.values() for parameter in parameters]
    described = [
        {"params": parameters, "weight_decay": options.weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(groups.items())
    ]
    betas = (options.adam_beta1, options.adam_beta2)
    if options.optimizer == "lamb":  # clipping by the global norm, before the step, is LAMB's pre-normalisation
        return Lamb(described, lr=options.lr, betas=betas, eps=options.adam_eps)
    if not FusedAdamW.takes(every):
        return torch.optim.AdamW(described, lr=options.lr, betas=betas, eps=options.adam_eps, fused=True)
    fused = FusedAdamW(described, lr=options.lr, betas=betas, eps=options.adam_eps, fused=True)
    if any(getattr(module, "fused", False) for stage in stages for module in stage.modules()):
        fused.write_copies(compute)
    return fused


@dataclass
class LossScale:
    """Megatron's dynamic loss scale: halves after `hysteresis` overflows, doubles after `window` good steps."""

    scale: float
    floor: float
    window: int
    hysteresis: int
    good_steps: int = 0
    overflows_left: int = 0

    def __post_init__(self) -> None:
        self.overflows_left = self.overflows_left or self.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale / 2, self.floor)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps, self.overflows_left = 0, self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows_left": self.overflows_left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]
        self.overflows_left = state["overflows_left"]


def build_loss_scale(options: OptimizerConfig) -> LossScale:
    return LossScale(options.initial_loss_scale, options.min_loss_scale, options.loss_scale_window, options.hysteresis)


class GradientNorm:
    """The norm of the whole model's gradient, and sums that travel with it."""

    def __init__(self, stages: list[nn.Module], grid: Grid, tied_copy: nn.Parameter | None) -> None:
        self._device = grid.device
        first_replica = grid.index("replica") == 0
        self._counted = []
        for stage in stages:
            for parameter in stage.parameters():
                whole_here = not is_sharded_over(parameter, "tensor") and grid.index("tensor") > 0
                unsharded_here = not is_sharded_over(parameter, "shard") and grid.index("shard") > 0
                if first_replica and not whole_here and not unsharded_here and parameter is not tied_copy:
                    self._counted.append(parameter)

    def reduce(self, *sums: Tensor) -> Tensor:
        """[norm, *sums added up over all ranks], on the device. The one world-wide exchange of a step."""
        gradients = [local(p.grad) for p in self._counted if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            square = norms.double().square().sum()
        together = torch.stack([square, *(s.double() for s in sums)])
        dist.all_reduce(together)
        together[0] = together[0].sqrt()
        return together


class HostCopy:
    """Numbers on their way from the device to the host, while the device goes on with what comes after them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._event = None
        if numbers.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers


def clip_and_step(optimizer: torch.optim.Optimizer, norm: Tensor, clip: float, scale: float) -> None:
    """One step with gradient / scale, clipped to a norm of `clip`; nothing changes if the norm is not finite.

    AdamW's fused kernels divide and decide on the device: the host does not wait for the norm. Other optimizers need its value.
    """
    divisor = torch.full_like(norm, scale)
    if clip > 0:
        divisor *= ((norm + 1e-6) / clip).clamp(min=1.0)
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    elif norm.isfinite():
        _divide_gradients(optimizer, divisor)
    else:
        return
    optimizer.step()


def _divide_gradients(optimizer: torch.optim.Optimizer, divisor: Tensor) -> None:
    every = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    gradients = [local(gradient) for gradient in every]
    if gradients:
        torch._foreach_div_(gradients, divisor.to(gradients[0].dtype))
