"""Reads safetensors files as mapped tensors: the header is checked against the file before anything is believed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from holdfast.conversion.tensors import WIDTHS, Tensor, bits_type, tensor_of
from holdfast.conversion.zips import Region, map_file
from holdfast.errors import HoldfastError

MAX_HEADER_BYTES = 64 << 20


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str], Region]:
    """The tensors of a file, its metadata, and its mapping."""
    region = map_file(path)
    length = int.from_bytes(region.data[:8], "little")
    if len(region.data) < 8 or length > min(MAX_HEADER_BYTES, len(region.data) - 8):
        raise HoldfastError(f"{path} is not a safetensors file, or it is cut short")
    try:
        header: Any = orjson.loads(region.data[8 : 8 + length])
    except orjson.JSONDecodeError:
        header = None
    if not isinstance(header, dict):
        raise HoldfastError(f"{path} is not a safetensors file: its header is not JSON")
    metadata = header.pop("__metadata__", {})
    body = region.part(8 + length, len(region.data) - 8 - length)
    tensors = {name: _tensor(path, name, entry, body) for name, entry in header.items()}
    if sum(tensor.nbytes for tensor in tensors.values()) != len(body.data):
        raise HoldfastError(f"{path} is cut short, or its header does not describe all of it")
    return tensors, metadata if isinstance(metadata, dict) else {}, region


def _tensor(path: Path, name: str, entry: Any, body: Region) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sane = dtype in WIDTHS and all(type(size) is int and 0 <= size < 1 << 50 for size in (*shape, start, end))
        sane = sane and end - start == math.prod(shape) * WIDTHS[dtype] and len(shape) <= 8
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise HoldfastError(f"{path}: the entry of {name} is broken or of an unknown type")
    part = body.part(start, end - start, f"{path}: {name}")
    return tensor_of(np.frombuffer(part.data, bits_type(dtype)).reshape(shape), dtype)
