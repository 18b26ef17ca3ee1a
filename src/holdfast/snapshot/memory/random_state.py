"""The small state beside the tensors: random generators, and the user's own objects (scheduler, scaler, cursor)."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.json_state import decode, encode
from holdfast.system.errors import HoldfastError


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
