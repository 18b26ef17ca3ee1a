"""The small state beside the tensors: random generators, optimizer settings, and the user's own objects (scheduler, scaler).

The invariant: it is JSON, and comes back exactly (see checkpoint/json_state.py).
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import torch

from holdfast.checkpoint.json_state import decode, encode
from holdfast.checkpoint.state import State
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

LARGE_BYTES = 16 << 20


def random_state() -> dict[str, Any]:
    """All random generators of this rank."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Extra:
    """The user's own small state: objects with `state_dict` and `load_state_dict`, or pairs of a getter and a setter."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._get: dict[str, Callable[[], Any]] = {}
        self._set: dict[str, Callable[[Any], Any]] = {}
        for name, part in parts.items():
            if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._get[name], self._set[name] = part.state_dict, part.load_state_dict
            elif isinstance(part, tuple) and len(part) == 2 and all(callable(function) for function in part):
                self._get[name], self._set[name] = part
            else:
                raise HoldfastError(
                    f"extra[{name!r}] is a {type(part).__name__}; give an object with state_dict() and load_state_dict(), "
                    "or a pair of functions (get, set)"
                )

    def get(self) -> dict[str, Any]:
        return {name: encode(get(), f"extra[{name!r}]") for name, get in self._get.items()}

    def set(self, saved: Mapping[str, Any]) -> None:
        for name, apply in self._set.items():
            if name in saved:
                apply(decode(saved[name]))


class SmallState:
    """What a snapshot holds beside the tensors, without the random generators. `fixed` is the same for the whole run."""

    def __init__(self, state: State, extra: Extra, fixed: Mapping[str, Any]) -> None:
        self._state, self._extra, self._fixed = state, extra, fixed

    def get(self, plan: Mapping[str, Any], numbers: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`numbers`: the optimizer's plain numbers, if they are known."""
        changing = {"extra": self._extra.get(), "optimizer": self._state.optimizer_settings(numbers)}
        return {**changing, "padded_rows": self._state.padded_rows, **self._fixed, **plan}

    def size(self, plan: Mapping[str, Any]) -> int:
        """Its bytes now, with the random generators."""
        size = len(orjson.dumps({**self.get(plan), "random": encode(random_state(), "random state")}))
        if size > LARGE_BYTES:
            log(
                f"the small state takes {size / 1e6:.0f} MB and is written as JSON at every step: give large tensors (an average "
                "of the weights) as a model beside the model, torch.nn.ModuleDict({'model': ..., 'average': ...}), not as extra"
            )
        return size
