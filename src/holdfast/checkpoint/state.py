"""What belongs to a training state, under global names: parameters, persistent buffers, optimizer tensors, small JSON.

The invariant: the same state has the same names in every layout. Wrappers (DDP, torch.compile, activation checkpointing) leave no
trace in a name, tied parameters occur once, and a DTensor is described by the slice that this rank holds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.checkpoint.json_state import DTYPE_NAMES, DTYPES, decode, encode
from holdfast.checkpoint.layout import TensorSlice
from holdfast.checkpoint.plan import LocalTensor
from holdfast.system.errors import HoldfastError

NUMBER = (int, float)  # a tuple: a union would be built, and checked slowly, for every tensor of every snapshot
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Item:
    """A tensor of the state and the slice of it that this rank holds. `local` shares the parameter's memory."""

    name: str
    local: torch.Tensor
    box: TensorSlice
    live: torch.Tensor
    """what the model or the optimizer has itself (of a DTensor this rank's part); `local` shares its version counter"""
    divisible: bool = True

    @property
    def held(self) -> LocalTensor:
        return LocalTensor(self.box, self.divisible)


class State:
    """What to save and where to load it: see the package's docstring."""

    def __init__(
        self,
        models: torch.nn.Module | Sequence[torch.nn.Module],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        shared: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        replica_group: dist.ProcessGroup | None = None,
        padded_rows: Mapping[str, int] | None = None,
    ) -> None:
        self.models = [models] if isinstance(models, torch.nn.Module) else list(models)
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.shared = dict(shared or {})
        self.per_rank = dict(per_rank or {})
        self.replica_group = replica_group
        self.padded_rows = dict(padded_rows or {})
        self.parameters = dict(_named_parameters(self.models))
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def replica_set(self) -> str | None:
        """A name of the ranks that divide replicated tensors among themselves; None stands for all ranks."""
        if self.replica_group is None:
            return None
        return ",".join(map(str, dist.get_process_group_ranks(self.replica_group)))

    def items(self, optimizer: bool = True) -> list[Item]:
        """Every tensor of the state that this rank holds a part of."""
        found = [describe(f"model.{name}", parameter) for name, parameter in self.parameters.items()]
        found += [describe(f"model.{name}", buffer, divisible=False) for name, buffer in _named_buffers(self.models)]
        if optimizer:
            for name, state in self.optimizer_state():
                for key, value in sorted(state.items()):
                    if isinstance(value, torch.Tensor):
                        found.append(describe(f"optimizer.{name}.{key}", value))
                    elif value is not None and not isinstance(value, NUMBER):
                        raise HoldfastError(
                            f"the optimizer keeps a {type(value).__name__} as {key} of {name}; only tensors and numbers can be "
                            "saved, and a run resumed without it would not be the same"
                        )
        return found

    def optimizer_state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each optimised parameter's name and its (live) state."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in optimizer.state:
                        yield self.name_of(parameter), optimizer.state[parameter]

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of an optimised parameter. A shard of a replicated one names that one by its attribute `shard_of`."""
        try:
            return self._names[id(getattr(parameter, "shard_of", parameter))]
        except KeyError:
            raise HoldfastError(
                f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that none of the models has; "
                "give the models whose parameters it optimises"
            ) from None

    def optimizer_settings(self, numbers: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Param-group settings (learning rates) with the names of their parameters, and optimizer state that is a plain number:
        `numbers`, if the caller knows it. JSON. `exact`: tuples and lists are distinguished, which files of earlier versions do
        not do."""
        entries = []
        numbers = self.plain_numbers() if numbers is None else numbers
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                names = [self.name_of(parameter) for parameter in group["params"]]
                entries.append(
                    {
                        "parameters": names,
                        "settings": {key: _plain(key, value) for key, value in group.items() if key != "params"},
                        "numbers": {name: numbers[name] for name in names if name in numbers} if numbers else {},
                        "exact": True,
                    }
                )
        return entries

    def plain_numbers(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is a plain number, by the name of its parameter."""
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in chain.from_iterable(optimizer.state.items() for optimizer in self.optimizers):
            for key, value in state.items():
                if isinstance(value, NUMBER):
                    numbers.setdefault(self.name_of(parameter), {})[key] = encode(value, key)
        return numbers

    def apply_optimizer_settings(self, saved: Iterable[Mapping[str, Any]]) -> None:
        groups = {name: (entry["settings"], entry.get("exact")) for entry in saved for name in entry["parameters"]}
        numbers = {name: values for entry in saved for name, values in entry["numbers"].items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                names = [self.name_of(parameter) for parameter in group["params"]]
                settings, exact = next((groups[name] for name in names if name in groups), ({}, True))
                for key, value in settings.items():
                    _set(group, key, decode(value), exact)
                for name, parameter in zip(names, group["params"], strict=True):
                    if name in numbers:
                        optimizer.state[parameter].update(decode(numbers[name]))

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Removes optimizer state that the block created, if it raises: an older checkpoint may not have that state."""
        known = [{parameter: set(state) for parameter, state in o.state.items()} for o in self.optimizers]
        try:
            yield
        except BaseException:
            for optimizer, before in zip(self.optimizers, known, strict=True):
                for parameter in list(optimizer.state):
                    for key in set(optimizer.state[parameter]) - before.get(parameter, set()):
                        del optimizer.state[parameter][key]
                    if parameter not in before:
                        del optimizer.state[parameter]
            raise

    def create_optimizer_state(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Creates the optimizer tensors that a checkpoint has (name → dtype, shape) and this optimizer does not have yet."""
        keys: dict[str, list[str]] = {}
        for name in tensors:
            if name.startswith("optimizer."):
                parameter_name, key = name.removeprefix("optimizer.").rsplit(".", 1)
                keys.setdefault(parameter_name, []).append(key)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.name_of(parameter)
                    for key in keys.get(name, ()):
                        if key not in optimizer.state[parameter]:
                            dtype, shape = tensors[f"optimizer.{name}.{key}"]
                            rows = self.padded_rows.get(name)
                            state = _empty_state(parameter, group, DTYPES[dtype], shape, rows)
                            optimizer.state[parameter][key] = state


def describe(name: str, tensor: torch.Tensor, divisible: bool = True) -> Item:
    """The item of one tensor: which slice of the global tensor this rank holds."""
    shape = tuple(tensor.shape)
    offset: tuple[int, ...] = (0,) * len(shape)
    local, live = tensor.detach(), tensor
    if isinstance(local, DTensor):
        if any(isinstance(placement, Partial) for placement in local.placements):
            raise HoldfastError(f"{name} is a partial sum (DTensor with Partial placement); reduce it before saving")
        _, offset = compute_local_shape_and_global_offset(shape, local.device_mesh, local.placements)
        local = live = local.to_local()
    if local.dtype not in DTYPE_NAMES:
        raise HoldfastError(f"{name} has dtype {local.dtype}, which safetensors files cannot hold")
    if math.prod(local.shape) == 0 or not offset:
        offset = (0,) * len(shape)
    box = TensorSlice(name, DTYPE_NAMES[local.dtype], shape, tuple(offset), tuple(local.shape))
    return Item(name, local, box, live, divisible)


def clean_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod") and isinstance(module._orig_mod, torch.nn.Module):
            module = module._orig_mod
        else:
            return module


def _named_parameters(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    seen: dict[int, str] = {}
    names: set[str] = set()
    for model in models:
        for raw, parameter in unwrap(model).named_parameters():
            name = clean_name(raw)
            if id(parameter) in seen:
                continue
            if name in names:
                raise HoldfastError(
                    f"two of the models have a parameter called {name}; pipeline stages need global names"
                )
            seen[id(parameter)] = name
            names.add(name)
            yield name, parameter


def _named_buffers(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for model in models:
        for prefix, module in unwrap(model).named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                yield clean_name(f"{prefix}.{key}" if prefix else key), buffer


def _empty_state(
    parameter: torch.Tensor, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...], rows: int | None
) -> torch.Tensor:
    like_parameter = tuple(parameter.shape) == shape or (rows and tuple(parameter.shape)[1:] == shape[1:] and shape)
    if like_parameter:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    on_host = not shape and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)


def _plain(key: str, value: Any) -> Any:
    scalar = isinstance(value, torch.Tensor) and not value.shape
    return encode(value.item() if scalar else value, f"the optimizer's {key}")


def _set(group: dict[str, Any], key: str, value: Any, exact: bool | None) -> None:
    current = group.get(key)
    if isinstance(current, torch.Tensor):
        current.copy_(value) if isinstance(value, torch.Tensor) else current.fill_(value)
    elif isinstance(value, list) and not exact:
        group[key] = tuple(value)
    else:
        group[key] = value
