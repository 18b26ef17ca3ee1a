"""Notices live tensors that were replaced since they were last listed, at a small cost for every step."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state import State


class TensorWatch:
    """Records the tensors of a state as they are now: parameters by their memory, buffers and optimizer state by identity."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._parameters = list(state.parameters.values())
        self._addresses = _addresses(self._parameters)
        self._buffers = [
            (module._buffers, name)
            for model in state.models
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._values = self._assignable()  # kept alive: the id of an object that is gone may be given to another
        self._ids, self._tensor_ids = list(map(id, self._values)), _tensor_ids(self._values)

    def replaced(self) -> bool:
        """Whether a parameter's memory, a buffer or an optimizer's tensor is another one now."""
        if _addresses(self._parameters) != self._addresses:
            return True
        values = self._assignable()
        if list(map(id, values)) == self._ids:
            return False
        return _tensor_ids(values) != self._tensor_ids  # a plain number is a new object at every step

    def _assignable(self) -> list[Any]:
        """What may be replaced by assignment, as it is now: optimizer state and persistent buffers."""
        states = chain.from_iterable(optimizer.state.values() for optimizer in self._state.optimizers)
        values = list(chain.from_iterable(state.values() for state in states))
        return values + [buffers.get(name) for buffers, name in self._buffers]


def _tensor_ids(values: Sequence[Any]) -> list[int]:
    return [id(value) for value in values if isinstance(value, torch.Tensor)]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t._local_tensor.data_ptr() if isinstance(t, DTensor) else t.data_ptr() for t in tensors]
