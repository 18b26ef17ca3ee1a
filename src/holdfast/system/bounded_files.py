"""Input files of unknown origin: regular, and not larger than their kind can be.

The invariant: nothing here blocks, and no more is read or parsed than the caller allows. A pipe, a device or a socket is
refused before it is opened for reading; JSON is counted before it is parsed, because one byte of it can take thirty in memory.
"""

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from holdfast.system.errors import HoldfastError

MAX_JSON_VALUES = 1_000_000


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading and refuses anything else; opening never waits for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise HoldfastError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, limit: int, kind: str) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if content is None or len(content) > limit:
        raise HoldfastError(f"{path} is larger than {limit >> 20} MiB, which no {kind} is")
    return content


def count_json_values(content: bytes) -> int:
    """An upper bound of the values in a JSON text, without parsing it."""
    return 1 + sum(content.count(mark) for mark in (b"[", b"{", b","))


def read_json(path: Path, limit: int, kind: str, values: int = MAX_JSON_VALUES) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes and `values` values."""
    try:
        content = read_bounded(path, limit, kind)
    except FileNotFoundError:
        raise HoldfastError(f"{path} is missing") from None
    if count_json_values(content) > values:
        raise HoldfastError(f"{path} has more than {values:,} values, which no {kind} has")
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise HoldfastError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HoldfastError(f"{path} is not a JSON object")
    return value
