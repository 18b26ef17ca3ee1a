"""Small state (settings, schedulers, cursors, random generators) as JSON, and back, exactly.

The invariant: `decode(encode(x)) == x` for everything accepted: what JSON lacks (infinity, tuples, bytes, tensors, arrays, keys
that are not strings) is tagged; what cannot be expressed exactly is refused by name. `decode` never executes anything.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import _TYPES

from holdfast.checkpoint.layout import ITEM_SIZES
from holdfast.system.errors import HoldfastError

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _TYPES.items() if dtype and name in ITEM_SIZES}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
TAG = "holdfast:"


def encode(value: Any, where: str = "extra") -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG + "float": repr(float(value))}
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return {TAG + "int": str(value)}
    if isinstance(value, str) and not _has_utf8(value):
        return {TAG + "text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and _all_plain_integers(value):  # a random generator's hundreds of words
        return list(value) if isinstance(value, list) else {TAG + "tuple": list(value)}
    if isinstance(value, list):
        return [encode(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, tuple):
        return {TAG + "tuple": [encode(entry, f"{where}[{i}]") for i, entry in enumerate(value)]}
    if isinstance(value, bytes):
        return {TAG + "bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {TAG + "tensor": [DTYPE_NAMES[value.dtype], list(value.shape), base64.b64encode(content).decode()]}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {TAG + "array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(TAG) and _has_utf8(key) for key in value):
            return {key: encode(entry, f"{where}.{key}") for key, entry in value.items()}
        pairs = [[encode(key, where), encode(entry, f"{where}.{key}")] for key, entry in value.items()]
        return {TAG + "dict": pairs}
    raise HoldfastError(
        f"{where} is a {type(value).__name__}, which a snapshot cannot hold; "
        "give numbers, strings, lists, dicts, tensors or arrays"
    )


def _all_plain_integers(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 64


def _has_utf8(text: str) -> bool:
    """False for a lone surrogate, which JSON cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key.startswith(TAG):
            return _decode_tagged(key.removeprefix(TAG), content)
    return {key: decode(entry) for key, entry in value.items()}


def _decode_tagged(kind: str, content: Any) -> Any:
    if kind == "tuple":
        return tuple(decode(entry) for entry in content)
    if kind in ("float", "int"):
        return (float if kind == "float" else int)(content)
    if kind == "text":
        return base64.b64decode(content).decode("utf-8", "surrogatepass")
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {decode(key): decode(entry) for key, entry in content}
    dtype, shape, data = content
    raw = bytearray(base64.b64decode(data))
    if kind == "array":
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
    assert kind == "tensor", kind
    if not raw:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(raw, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)
