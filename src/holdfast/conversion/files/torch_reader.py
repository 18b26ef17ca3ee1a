"""Both serialisations of torch, read without torch: the tree of a .pt file, with its tensors as views of the mapped file.

The invariant: every view that leaves this file lies inside the storage that the file declares for it, and every storage inside
the file. What the pickle names is never called; it becomes an InertObject.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.conversion.files.budget import Budget
from holdfast.conversion.files.pickles import Global, InertObject, load_pickle, plain
from holdfast.conversion.files.zips import Member, Region, check_crc, is_zip, open_member, read_directory
from holdfast.conversion.tensors import WIDTHS, Bits, Tensor, bits_type, tensor_of
from holdfast.system.errors import HoldfastError

LEGACY_START = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The pickled magic number with which a file of torch before 1.6 begins."""

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "UntypedStorage": "U8", "Float8_e4m3fnStorage": "F8_E4M3", "Float8_e5m2Storage": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class TorchStorage:
    key: str
    dtype: str
    count: int


@dataclass(eq=False, frozen=True)
class StoredTensor:
    """A tensor as a pickle describes it; `view` gives its bits, and checks that they are where they should be."""

    storage: TorchStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    locate: Callable[[TorchStorage], Region]

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    def view(self) -> Bits:
        sane = len(self.shape) == len(self.stride) <= 8
        if not sane or not all(map(is_size, (self.offset, *self.shape, *self.stride))):
            raise HoldfastError(f"a tensor with impossible shape {plain(self.shape)} or stride {plain(self.stride)}")
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        count = math.prod(self.shape)
        if count and (self.offset + reach > self.storage.count or count > self.storage.count):
            raise HoldfastError(
                f"a tensor of shape {self.shape} reaches outside its storage of {self.storage.count} elements"
            )
        region, width = self.locate(self.storage), WIDTHS[self.dtype]
        strides = tuple(step * width for step in self.stride)
        if not count:
            return np.empty(self.shape, bits_type(self.dtype))
        return np.ndarray(self.shape, bits_type(self.dtype), region.data, self.offset * width, strides)

    def tensor(self) -> Tensor:
        return tensor_of(self.view(), self.dtype)


@dataclass(frozen=True)
class TorchFile:
    """What torch.save wrote: the tree, with StoredTensor leaves, and the names in it that were not resolved."""

    name: str
    tree: Any
    names: set[str]
    serialisation: str
    region: Region


def is_torch_file(region: Region) -> bool:
    if bytes(region.data[: len(LEGACY_START)]) == LEGACY_START:
        return True
    return is_zip(region) and any(name.endswith("/data.pkl") for name in read_directory(region, Budget()))


def load_torch(region: Region, budget: Budget) -> TorchFile:
    """Reads a file of torch.save, in the zip form or the one before torch 1.6. Unknown objects become InertObjects."""
    if is_zip(region):
        return _load_zip(region, budget)
    if bytes(region.data[: len(LEGACY_START)]) == LEGACY_START:
        return _load_legacy(region, budget)
    raise HoldfastError(f"{region.name} is not a file that torch.save wrote")


def _load_zip(region: Region, budget: Budget) -> TorchFile:
    members = read_directory(region, budget)
    roots = [name.removesuffix("data.pkl") for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise HoldfastError(f"{region.name} is a zip, but not one that torch.save wrote")
    root = roots[0]
    # torch.save without checksums (set_crc32_options) writes 0 for every member.
    has_checksums = members[f"{root}data.pkl"].crc != 0
    order = members.get(f"{root}byteorder")
    if order is not None and bytes(_open_stored(region, order).data[:7]) != b"little":
        raise HoldfastError(f"{region.name} was written on a big-endian machine; that is not supported")

    def locate(storage: TorchStorage) -> Region:
        member = members.get(f"{root}data/{storage.key}")
        if member is None:
            raise HoldfastError(f"{region.name}: storage {storage.key} is missing")
        found = _open_stored(region, member)
        if storage.count * WIDTHS[storage.dtype] > len(found.data):
            raise HoldfastError(f"{region.name}: storage {storage.key} is smaller than the pickle declares")
        if has_checksums:
            budget.unchecked[found.name] = (found, member.crc)
        return found

    pickled = _open_stored(region, members[f"{root}data.pkl"])
    tree, _, names = _load_tree(pickled.data, budget, region.name, locate)
    if has_checksums:
        check_crc(pickled, members[f"{root}data.pkl"].crc)
    return TorchFile(region.name, tree, names, "zip", region)


def _open_stored(region: Region, member: Member) -> Region:
    if member.method != 0:
        raise HoldfastError(f"{region.name}: {member.name} is compressed, which torch.save never does")
    return open_member(region, member)


def _load_legacy(region: Region, budget: Budget) -> TorchFile:
    at, heads = 0, []
    for _ in range(3):
        value, length, _ = _plain_pickle(region, at, budget)
        heads.append(value)
        at += length
    if heads[1] != 1001 or not (isinstance(heads[2], dict) and heads[2].get("little_endian", True) is True):
        raise HoldfastError(f"{region.name} has an unknown protocol or byte order")
    places: dict[str, tuple[int, int]] = {}
    declared: dict[str, TorchStorage] = {}

    def locate(storage: TorchStorage) -> Region:
        if storage.key not in places:
            raise HoldfastError(f"{region.name}: storage {storage.key} is missing")
        start, count = places[storage.key]
        if storage.count > count:
            raise HoldfastError(f"{region.name}: storage {storage.key} is smaller than the pickle declares")
        return region.part(start, count * WIDTHS[storage.dtype], f"{region.name}: storage {storage.key}")

    tree, length, names = _load_tree(region.data[at:], budget, region.name, locate, declared)
    at += length
    keys, length, _ = _plain_pickle(region, at, budget)
    at += length
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in declared for key in keys):
        raise HoldfastError(f"{region.name}: its list of storages is broken")
    for key in keys:
        count = struct.unpack("<q", region.part(at, 8).data)[0]
        size = count * WIDTHS[declared[key].dtype]
        region.part(at + 8, size, f"{region.name}: storage {key}")
        places[key] = (at + 8, count)
        at += 8 + size
    return TorchFile(region.name, tree, names, "legacy", region)


def _plain_pickle(region: Region, at: int, budget: Budget) -> tuple[Any, int, set[str]]:
    try:
        return load_pickle(region.data[at:], budget)
    except HoldfastError as error:
        raise HoldfastError(f"{region.name}: {error}") from None


def _load_tree(
    data: memoryview,
    budget: Budget,
    name: str,
    locate: Callable[[TorchStorage], Region],
    declared: dict[str, TorchStorage] | None = None,
) -> tuple[Any, int, set[str]]:
    def persistent(identity: Any) -> TorchStorage:
        if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
            raise HoldfastError("a persistent id that is not a storage")
        _, kind, key, _, count = identity[:5]
        dtype = STORAGES.get(kind.name) if isinstance(kind, Global) and kind.module.startswith("torch") else None
        is_view = len(identity) == 6 and identity[5] is not None
        if dtype is None or not isinstance(key, str) or not is_size(count) or is_view:
            raise HoldfastError(f"a storage of unknown kind {plain(kind)}")
        storage = TorchStorage(key, dtype, count)
        if declared is not None and declared.setdefault(key, storage) != storage:
            raise HoldfastError(f"storage {key} is declared twice, differently")
        return storage

    def rebuild(arguments: tuple[Any, ...]) -> StoredTensor:
        storage, offset, shape, stride = arguments[:4]
        if not isinstance(storage, TorchStorage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
            raise HoldfastError("a tensor without storage, shape or stride")
        return StoredTensor(storage, offset, shape, stride, locate)

    calls: dict[str, Callable[[tuple[Any, ...]], Any]] = {
        "torch._utils._rebuild_tensor_v2": rebuild,
        "torch._utils._rebuild_tensor": rebuild,
        "torch._utils._rebuild_parameter": lambda arguments: arguments[0],
        "torch.Size": torch_size,
        "collections.OrderedDict": _ordered_dict,
    }
    try:
        tree, length, names = load_pickle(data, budget, calls, persistent)
    except HoldfastError as error:
        raise HoldfastError(f"{name}: {error}") from None
    return tree, length, {found for found in names if found not in calls and not found.startswith("torch.")}


def torch_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch.Size of a list of numbers; of a long text it would be a tuple of its characters."""
    if not isinstance(arguments[0], list | tuple):
        raise HoldfastError("a torch.Size of something that is not a list")
    return tuple(arguments[0])


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = arguments[0] if arguments else []
    return {pair[0]: pair[1] for pair in pairs if isinstance(pair[0], str)}


def is_size(number: Any) -> bool:
    """Whether a number out of a file can be a size or an offset."""
    return type(number) is int and 0 <= number < 1 << 50


def describe(value: Any) -> str:
    """A value in an error message: something other than the tensor that was expected."""
    return f"an inert {value.name}" if isinstance(value, InertObject) else type(value).__name__
