"""Writes what torch.save writes, without torch: a stored zip with one pickle of plain data and one member per tensor.

The invariant: the pickle names nothing but OrderedDict, argparse.Namespace, torch's tensor rebuilder, its storage types and
dtypes, so that torch.load(weights_only=True) with Namespace allowed reads it. All places are known before any tensor is read.
"""

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.conversion.tensors import WIDTHS, Tensor
from holdfast.system.descriptors import pwrite_all

_STORAGES = {
    "F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage", "I64": "LongStorage",
    "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage", "U8": "ByteStorage", "BOOL": "BoolStorage",
}  # fmt: skip
ALIGNMENT = 64


@dataclass(frozen=True)
class Namespace:
    """Becomes an argparse.Namespace with these attributes."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class TorchName:
    """Becomes the global torch.<name>, such as a dtype."""

    name: str


@dataclass(frozen=True)
class Ordered:
    """Becomes an OrderedDict."""

    values: Mapping[str, Any]


@dataclass
class _Entry:
    name: str
    size: int
    crc: int
    header: int
    """Where its local header starts."""
    extra: bytes


@dataclass
class TorchLayout:
    places: dict[str, int]
    entries: list[_Entry]
    small: list[tuple[int, bytes]]
    keys: dict[str, str]
    end: int
    names: dict[str, _Entry] = field(default_factory=dict)

    def start(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self.end)
        for at, content in self.small:
            pwrite_all(descriptor, content, at)

    def finish(self, descriptor: int, checksums: Mapping[str, int]) -> None:
        for name, crc in checksums.items():
            self.names[name].crc = crc
        directory = b""
        for entry in self.entries:
            pwrite_all(descriptor, _local_header(entry), entry.header)
            directory += _directory_entry(entry)
        pwrite_all(descriptor, directory + _end(len(self.entries), len(directory), self.end), self.end)


def lay_out_torch(tree: Any, tensors: Mapping[str, Tensor], root: str) -> TorchLayout:
    """Where everything goes. `tensors` names the Tensor objects that are the leaves of `tree`."""
    keys = {id(tensor): str(index) for index, tensor in enumerate(tensors.values())}
    pickled = _Pickler(keys).pickle(tree)
    layout = TorchLayout({}, [], [], {}, 0)

    def add(name: str, size: int, crc: int = 0) -> tuple[_Entry, int]:
        raw = f"{root}/{name}".encode()
        header = layout.end
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= 0xFFFFFFFF else b""
        padding = -(header + 30 + len(raw) + len(zip64) + 4) % ALIGNMENT
        extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        entry = _Entry(raw.decode(), size, crc, header, extra)
        layout.entries.append(entry)
        start = header + 30 + len(raw) + len(extra)
        layout.end = start + size
        return entry, start

    for name, content in (("data.pkl", pickled), ("byteorder", b"little")):
        _, start = add(name, len(content), zlib.crc32(content))
        layout.small.append((start, content))
    for (name, tensor), key in zip(tensors.items(), keys.values(), strict=True):
        layout.names[name], layout.places[name] = add(f"data/{key}", tensor.nbytes)
    _, start = add("version", 2, zlib.crc32(b"3\n"))
    layout.small.append((start, b"3\n"))
    return layout


def _local_header(entry: _Entry) -> bytes:
    name, size = entry.name.encode(), min(entry.size, 0xFFFFFFFF)
    version = 45 if size == 0xFFFFFFFF else 20
    fixed = struct.pack(
        "<4s5HIIIHH", b"PK\x03\x04", version, 0x800, 0, 0, 0x21, entry.crc, size, size, len(name), len(entry.extra)
    )
    return fixed + name + entry.extra


def _directory_entry(entry: _Entry) -> bytes:
    name, size, offset = entry.name.encode(), min(entry.size, 0xFFFFFFFF), min(entry.header, 0xFFFFFFFF)
    large = ([entry.size] * 2 if size == 0xFFFFFFFF else []) + ([entry.header] if offset == 0xFFFFFFFF else [])
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = 45 if large else 20
    fixed = struct.pack(
        "<4s6HIIIHHHHHII", b"PK\x01\x02", version, version, 0x800, 0, 0, 0x21, entry.crc, size, size,
        len(name), len(extra), 0, 0, 0, 0, offset,
    )  # fmt: skip
    return fixed + name + extra


def _end(count: int, size: int, start: int) -> bytes:
    """The end of the directory, always with its 64-bit form in front: no case distinction, and every reader takes it."""
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    return (
        record
        + locator
        + struct.pack(
            "<4s4HIIH",
            b"PK\x05\x06",
            0,
            0,
            min(count, 0xFFFF),
            min(count, 0xFFFF),
            min(size, 0xFFFFFFFF),
            min(start, 0xFFFFFFFF),
            0,
        )
    )


class _Pickler:
    """Protocol 2, plain data only, nothing memoised: what a program can read as easily as torch does."""

    def __init__(self, keys: Mapping[int, str]) -> None:
        self._keys = keys
        self._out: list[bytes] = []

    def pickle(self, tree: Any) -> bytes:
        self._out = [b"\x80\x02"]
        self._save(tree)
        return b"".join([*self._out, b"."])

    def _save(self, value: Any) -> None:
        out = self._out
        if value is None or isinstance(value, bool):
            out.append(b"N" if value is None else b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            out.append(
                b"J" + struct.pack("<i", value) if -(1 << 31) <= value < 1 << 31 else b"\x8a" + bytes([len(raw)]) + raw
            )
        elif isinstance(value, float):
            out.append(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            raw = value.encode()
            out.append(b"X" + struct.pack("<I", len(raw)) + raw)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, TorchName):
            out.append(f"ctorch\n{value.name}\n".encode())
        elif isinstance(value, Namespace):
            out.append(b"cargparse\nNamespace\n)\x81")
            self._save(dict(value.values))
            out.append(b"b")
        elif isinstance(value, Ordered):
            out.append(b"ccollections\nOrderedDict\n)R")
            self._items(value.values)
        elif isinstance(value, Mapping):
            out.append(b"}")
            self._items(value)
        elif isinstance(value, list | tuple):
            out.append(b"(")
            for item in value:
                self._save(item)
            out.append(b"l" if isinstance(value, list) else b"t")
        else:
            raise TypeError(f"no place for {type(value).__name__} in a checkpoint")

    def _items(self, values: Mapping[Any, Any]) -> None:
        self._out.append(b"(")
        for key, value in values.items():
            self._save(key)
            self._save(value)
        self._out.append(b"u")

    def _tensor(self, tensor: Tensor) -> None:
        key = self._keys[id(tensor)]
        count = tensor.nbytes // WIDTHS[tensor.dtype]
        strides: list[int] = []
        step = 1
        for size in reversed(tensor.shape):
            strides.insert(0, step)
            step *= max(1, size)
        self._out.append(b"ctorch._utils\n_rebuild_tensor_v2\n(")
        self._out.append(b"(")
        self._save("storage")
        self._out.append(f"ctorch\n{_STORAGES[tensor.dtype]}\n".encode())
        for value in (key, "cpu", count):
            self._save(value)
        self._out.append(b"tQ")
        for argument in (0, tuple(tensor.shape), tuple(strides), False):
            self._save(argument)
        self._out.append(b"ccollections\nOrderedDict\n)RtR")
