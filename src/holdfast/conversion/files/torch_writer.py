"""Writes what torch.save writes, without torch: a stored zip with one pickle of plain data and one member per tensor.

The invariant: the pickle names nothing but OrderedDict, argparse.Namespace, torch's tensor rebuilder, its storage types and
dtypes, so that torch.load(weights_only=True) with Namespace allowed reads it. All places are known before any tensor is read.
"""

import os
import struct
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.conversion.files.pickles import Global
from holdfast.conversion.files.torch_reader import STORAGES
from holdfast.conversion.tensors import WIDTHS, Tensor
from holdfast.system.descriptors import pwrite_all

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
ALIGNMENT = 64
NONE_32 = 0xFFFFFFFF
"""Stands in a 32-bit field of a zip whose value is in the 64-bit extension."""
PLAIN = struct.pack("<4H", 0x800, 0, 0, 0x21)
"""Fields of both headers: a UTF-8 name, stored, at the first moment of 1980."""


@dataclass
class _ZipEntry:
    name: bytes
    size: int
    header: int
    """Where its local header starts."""
    extra: bytes
    crc: int = 0

    @property
    def start(self) -> int:
        return self.header + 30 + len(self.name) + len(self.extra)


@dataclass
class TorchLayout:
    """The members of a zip with their places; checksums of tensors come last."""

    root: str
    tensors: dict[str, _ZipEntry] = field(default_factory=dict)
    end: int = 0
    _entries: list[_ZipEntry] = field(default_factory=list)
    _contents: dict[int, bytes] = field(default_factory=dict)

    def add(self, name: str, size: int) -> _ZipEntry:
        raw = f"{self.root}/{name}".encode()
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= NONE_32 else b""
        padding = -(self.end + 30 + len(raw) + len(zip64) + 4) % ALIGNMENT
        extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        entry = _ZipEntry(raw, size, self.end, extra)
        self._entries.append(entry)
        self.end = entry.start + size
        return entry

    def add_content(self, name: str, content: bytes) -> None:
        entry = self.add(name, len(content))
        entry.crc = zlib.crc32(content)
        self._contents[entry.start] = content

    def start(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self.end)
        for at, content in self._contents.items():
            pwrite_all(descriptor, content, at)

    def finish(self, descriptor: int, checksums: Mapping[str, int]) -> None:
        for name, crc in checksums.items():
            self.tensors[name].crc = crc
        directory = b""
        for entry in self._entries:
            pwrite_all(descriptor, _local_header(entry), entry.header)
            directory += _directory_entry(entry)
        pwrite_all(descriptor, directory + _end(len(self._entries), len(directory), self.end), self.end)


def lay_out_torch(tree: Any, tensors: Mapping[str, Tensor], root: str) -> TorchLayout:
    """Where everything goes. `tensors` names the Tensor objects that are the leaves of `tree`."""
    keys = {id(tensor): str(index) for index, tensor in enumerate(tensors.values())}
    layout = TorchLayout(root)
    layout.add_content("data.pkl", _Pickler(keys).pickle(tree))
    layout.add_content("byteorder", b"little")
    for (name, tensor), key in zip(tensors.items(), keys.values(), strict=True):
        layout.tensors[name] = layout.add(f"data/{key}", tensor.nbytes)
    layout.add_content("version", b"3\n")
    return layout


def _local_header(entry: _ZipEntry) -> bytes:
    size = min(entry.size, NONE_32)
    version = 45 if size == NONE_32 else 20
    lengths = len(entry.name), len(entry.extra)
    header = struct.pack("<4sH", b"PK\x03\x04", version) + PLAIN + struct.pack("<3I2H", entry.crc, size, size, *lengths)
    return header + entry.name + entry.extra


def _directory_entry(entry: _ZipEntry) -> bytes:
    size, offset = min(entry.size, NONE_32), min(entry.header, NONE_32)
    large = ([entry.size] * 2 if size == NONE_32 else []) + ([entry.header] if offset == NONE_32 else [])
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = 45 if large else 20
    lengths = len(entry.name), len(extra)
    header = struct.pack("<4sHH", b"PK\x01\x02", version, version) + PLAIN
    # No comment, first disk, no attributes.
    header += struct.pack("<3I5H2I", entry.crc, size, size, *lengths, 0, 0, 0, 0, offset)
    return header + entry.name + extra


def _end(count: int, size: int, start: int) -> bytes:
    """The end of the directory, always with its 64-bit form in front: no case distinction, and every reader takes it."""
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    short, counted = (min(size, NONE_32), min(start, NONE_32)), min(count, 0xFFFF)
    return record + locator + struct.pack("<4s4HIIH", b"PK\x05\x06", 0, 0, counted, counted, *short, 0)


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
            small = -(1 << 31) <= value < 1 << 31
            out.append(b"J" + struct.pack("<i", value) if small else b"\x8a" + bytes([len(raw)]) + raw)
        elif isinstance(value, float):
            out.append(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            raw = value.encode()
            out.append(b"X" + struct.pack("<I", len(raw)) + raw)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, Global):
            out.append(f"c{value.module}\n{value.name}\n".encode())
        elif isinstance(value, Namespace):
            out.append(b"cargparse\nNamespace\n)\x81")
            self._save(vars(value))
            out.append(b"b")
        elif isinstance(value, Mapping):
            out.append(b"ccollections\nOrderedDict\n)R(" if isinstance(value, OrderedDict) else b"}(")
            for key, item in value.items():
                self._save(key)
                self._save(item)
            out.append(b"u")
        elif isinstance(value, list | tuple):
            out.append(b"](" if isinstance(value, list) else b"(")
            for item in value:
                self._save(item)
            out.append(b"e" if isinstance(value, list) else b"t")  # torch's safe loader has no opcode l
        else:
            raise TypeError(f"no place for {type(value).__name__} in a checkpoint")

    def _tensor(self, tensor: Tensor) -> None:
        key = self._keys[id(tensor)]
        count = tensor.nbytes // WIDTHS[tensor.dtype]
        strides: list[int] = []
        step = 1
        for size in reversed(tensor.shape):
            strides.insert(0, step)
            step *= max(1, size)
        self._out.append(b"ctorch._utils\n_rebuild_tensor_v2\n(")
        self._save(("storage", Global("torch", _STORAGE_OF[tensor.dtype]), key, "cpu", count))
        self._out.append(b"Q")
        for argument in (0, tensor.shape, tuple(strides), False):
            self._save(argument)
        self._out.append(b"ccollections\nOrderedDict\n)RtR")
