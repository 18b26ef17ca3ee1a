"""Reads safetensors files as mapped tensors: the header is checked against the file before any tensor is used."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.conversion.files.budget import MAX_TENSORS
from holdfast.conversion.files.torch_reader import is_size
from holdfast.conversion.files.zips import Region, map_file
from holdfast.conversion.tensors import WIDTHS, Tensor, bits_type, tensor_of
from holdfast.system.bounded_files import MAX_JSON_VALUES, count_json_values
from holdfast.system.errors import HoldfastError

MAX_HEADER_BYTES = 16 << 20


def read_safetensors(
    path: Path, ignored: Callable[[str], object] = lambda name: False
) -> tuple[dict[str, Tensor], dict[str, str], Region]:
    """The tensors of a file but for those whose names are `ignored`, its metadata, and its mapping."""
    region = map_file(path)
    length = int.from_bytes(region.data[:8], "little")
    if len(region.data) < 8 or length > min(MAX_HEADER_BYTES, len(region.data) - 8):
        raise HoldfastError(f"{path} is not a safetensors file, or it is cut short")
    header = _header(path, bytes(region.data[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    body = region.part(8 + length, len(region.data) - 8 - length)
    parts = {name: _part(path, name, entry, body) for name, entry in header.items()}
    end = 0
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        start, stop = header[name]["data_offsets"]
        if start != end:
            raise HoldfastError(f"{path}: {name} overlaps another tensor, or bytes in front of it belong to no tensor")
        end = stop
    if end != len(body.data):
        raise HoldfastError(f"{path} is cut short, or its header does not describe all of it")
    tensors = {name: _tensor(header[name], part) for name, part in parts.items() if not ignored(name)}
    return tensors, metadata if isinstance(metadata, dict) else {}, region


def _header(path: Path, text: bytes) -> dict[str, Any]:
    if count_json_values(text) > MAX_JSON_VALUES:
        raise HoldfastError(f"{path}: its header has more than {MAX_JSON_VALUES:,} values, which no model has")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise HoldfastError(f"{path} is not a safetensors file: its header is not JSON, or names something twice")
    if len(header) > MAX_TENSORS:
        raise HoldfastError(f"{path} has {len(header):,} tensors; more than {MAX_TENSORS:,} are not read")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _part(path: Path, name: str, entry: Any, body: Region) -> Region:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sane = dtype in WIDTHS and type(shape) is list and len(shape) <= 8
        sane = sane and all(map(is_size, (*shape, start, end)))
        sane = sane and end - start == math.prod(shape) * WIDTHS[dtype]
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise HoldfastError(f"{path}: the entry of {name} is broken or of an unknown type")
    return body.part(start, end - start, f"{path}: {name}")


def _tensor(entry: Any, part: Region) -> Tensor:
    return tensor_of(np.frombuffer(part.data, bits_type(entry["dtype"])).reshape(entry["shape"]), entry["dtype"])
