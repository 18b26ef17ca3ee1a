"""Notices live tensors that were replaced since they were last listed, and optimizer steps, at a small cost for every step."""

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state import State

_VALUES = operator.methodcaller("values")


class TensorWatch:
    """Records the tensors of a state as they are now: parameters by their memory, buffers and optimizer state by identity."""

    def __init__(self, state: State) -> None:
        self._state = state
        parameters = list(state.parameters.values())
        self._sharded = [p for p in parameters if isinstance(p, DTensor)]
        self._plain = [p for p in parameters if not isinstance(p, DTensor)]
        self._addresses = self._parameter_addresses()
        self._buffers = [
            (module._buffers, name)
            for model in state.models
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._values = self._assignable()  # kept alive: the id of an object that is gone may be given to another
        self._tensor_ids = _tensor_ids(self._values)
        self._identical = False
        self._numbers: dict[str, dict[str, Any]] | None = None

    def replaced(self) -> bool:
        """Whether a parameter's memory, a buffer or an optimizer's tensor is another one now."""
        if self._parameter_addresses() != self._addresses:
            return True
        values = self._assignable()
        self._identical = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        # a plain number is a new object at every step
        return not self._identical and _tensor_ids(values) != self._tensor_ids

    def plain_numbers(self) -> dict[str, dict[str, Any]]:
        """The optimizer state that is a plain number, as `replaced` found it."""
        if not self._identical:
            return self._state.plain_numbers()
        if self._numbers is None:
            self._numbers = self._state.plain_numbers()
        return self._numbers

    def _parameter_addresses(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self._plain), *(p._local_tensor.data_ptr() for p in self._sharded)]

    def _assignable(self) -> list[Any]:
        """What may be replaced by assignment, as it is now: optimizer state and persistent buffers."""
        states = chain.from_iterable(optimizer.state.values() for optimizer in self._state.optimizers)
        values = list(chain.from_iterable(map(_VALUES, states)))
        return values + [buffers.get(name) for buffers, name in self._buffers]


def _tensor_ids(values: Sequence[Any]) -> list[int]:
    return [id(value) for value in values if isinstance(value, torch.Tensor)]


def call_before_step(optimizer: Any, check: Callable[[], None]) -> None:
    """Has an optimizer, or the one inside a wrapper such as Accelerate's, call `check` before each step."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    optimizer.register_step_pre_hook(lambda *_: check())
