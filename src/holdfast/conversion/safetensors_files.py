"""Reads safetensors files as mapped tensors: the header is checked against the file before anything is believed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from holdfast.conversion.tensors import WIDTHS, Tensor, bits_type, tensor_of
from holdfast.conversion.zips import Region, map_file
from holdfast.errors import HoldfastError

MAX_HEADER_BYTES = 64 << 20


def read_safetensors(
    path: Path, ignored: Callable[[str], object] = lambda name: False
) -> tuple[dict[str, Tensor], dict[str, str], Region]:
    """The tensors of a file but for those whose names are `ignored`, its metadata, and its mapping."""
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
    parts = {name: _part(path, name, entry, body) for name, entry in header.items()}
    if sum(len(part.data) for part in parts.values()) != len(body.data):
        raise HoldfastError(f"{path} is cut short, or its header does not describe all of it")
    tensors = {name: _tensor(header[name], part) for name, part in parts.items() if not ignored(name)}
    return tensors, metadata if isinstance(metadata, dict) else {}, region


def _part(path: Path, name: str, entry: Any, body: Region) -> Region:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sane = dtype in WIDTHS and all(type(size) is int and 0 <= size < 1 << 50 for size in (*shape, start, end))
        sane = sane and end - start == math.prod(shape) * WIDTHS[dtype] and len(shape) <= 8
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise HoldfastError(f"{path}: the entry of {name} is broken or of an unknown type")
    return body.part(start, end - start, f"{path}: {name}")


def _tensor(entry: Any, part: Region) -> Tensor:
    return tensor_of(np.frombuffer(part.data, bits_type(entry["dtype"])).reshape(entry["shape"]), entry["dtype"])
