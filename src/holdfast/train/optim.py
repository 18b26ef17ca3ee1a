"""The optimizer step: parameter groups, the global gradient norm, clipping, and the fp16 loss scale.

The gradient norm and the loss travel in one world-wide all-reduce. A parameter counts once, however many ranks hold it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.config import OptimizerConfig
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import is_sharded_over, local, transformer_layers
from holdfast.system.errors import HoldfastError
from holdfast.train.fused_adamw import FusedAdamW
from holdfast.train.lamb import Lamb
from holdfast.train.learning_rates import Rate, has_own_rates, rate_of
from holdfast.train.muon import Muon


def build_optimizer(
    stages: list[nn.Module],
    options: OptimizerConfig,
    compute: torch.dtype,
    updated: Mapping[nn.Parameter, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over groups of what is `updated` of the parameters: with and without decay, sharded and plain (fused kernels
    take one kind at a time), for Muon the matrices of the layers, and parameters with a learning rate of their own."""
    muon = options.optimizer == "muon"
    layers = [layer for stage in stages for layer in transformer_layers(stage)] if muon else []
    matrices = {parameter for layer in layers for parameter in layer.parameters() if parameter.ndim == 2}
    groups: dict[tuple[bool, bool, bool, Rate], list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            own = updated[parameter] if updated else parameter
            kind = (parameter in matrices, own.ndim >= 2, isinstance(own, DTensor))
            groups.setdefault((*kind, rate_of(name, options)), []).append(own)
    every = [parameter for parameters in groups.values() for parameter in parameters]
    described = [
        {
            "params": parameters,
            "weight_decay": options.weight_decay if decays else 0.0,
            **({"muon": True} if matrix else {}),
            **({"max_lr": rate.peak, "min_lr": rate.floor} if has_own_rates(options) else {}),
        }
        for (matrix, decays, _, rate), parameters in sorted(groups.items(), key=lambda group: group[0])
    ]
    adam: dict[str, Any] = {
        "lr": options.lr,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_eps,
    }
    if muon:
        return Muon(described, **adam, momentum=options.muon_momentum, iterations=options.muon_num_ns_steps)
    if options.optimizer == "lamb":  # clipping by the global norm, before the step, is LAMB's pre-normalisation
        return Lamb(described, **adam)
    if has_own_rates(options) or not FusedAdamW.takes(every):  # its one launch has one learning rate
        return torch.optim.AdamW(described, **adam, fused=True)
    fused = FusedAdamW(described, **adam, fused=True)
    if any(getattr(module, "fused", False) for stage in stages for module in stage.modules()):
        fused.write_copies(compute)
    return fused


class GroupSettings:
    """What the configuration says about each group of an optimizer that has not loaded a state yet: decay, betas, epsilon.

    A checkpoint records the settings that it was trained with. The configuration decides them at every start, as it decides the
    learning rates, so they are set again after a state was loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = [_settings_of(group) for group in optimizer.param_groups]

    def apply(self) -> None:
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key in _settings_of(group).keys() - settings.keys():
                del group[key]  # of a checkpoint of other flags
            group.update(settings)

    def check_state(self, name: str) -> None:
        """Raises if the state that was loaded is that of another optimizer than `name`."""
        self.apply()
        for group in self._optimizer.param_groups:
            needed = {"momentum_buffer"} if group.get("muon") else {"step", "exp_avg", "exp_avg_sq"}
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if state and not needed <= state.keys():
                    raise HoldfastError(
                        f"the saved state is that of another optimizer than {name} (it has {', '.join(sorted(state))} where "
                        f"{name} needs {', '.join(sorted(needed))}): continue with the run's own --optimizer, or start a new "
                        "run folder from its weights with --load RUN --no-load-optim"
                    )


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


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

    def __init__(self, updated: Iterable[nn.Parameter], grid: Grid, tied_copy: nn.Parameter | None) -> None:
        self._device = grid.device
        # Of the ranks of an axis that hold copies, the first one counts.
        repeated = [axis for axis in ("replica", "shard", "tensor") if grid.index(axis) > 0]
        self._counted = [
            parameter
            for parameter in updated
            if parameter is not tied_copy and all(is_sharded_over(parameter, axis) for axis in repeated)
        ]

    def reduce(self, *sums: Tensor) -> Tensor:
        """[norm, *sums added up over all ranks], on the device. The one world-wide exchange of a step."""
        gradients = [local(p.grad) for p in self._counted if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            square = norms.double().square().sum()
        together = torch.stack([square, *(s.double() for s in sums)])
        if dist.get_world_size() > 1:
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
    if isinstance(optimizer, FusedAdamW):
        optimizer.clip_next(norm, clip, scale)
        optimizer.step()
        return
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
