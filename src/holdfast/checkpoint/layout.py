"""The bytes of one shard: a safetensors file of tensor slices, with their offsets in the global tensors.

Memory slots have the same layout as files, so that persisting a snapshot is a write of memory. The invariant: the layout is a
pure function of the slices; the header is padded with spaces to a page, so that tensors start page-aligned, and slices follow
each other without holes, widest items first, which keeps each of them aligned to its item size.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from holdfast.system.errors import HoldfastError

PAGE = 4096
LARGEST_HEADER = 100_000_000

# The dtypes that a training state may have, by their safetensors names. numpy has no bfloat16 and float8: they are read as
# unsigned integers of their bits.
NUMPY_TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F16": np.float16,
    "BF16": np.uint16,
    "I16": np.int16,
    "U16": np.uint16,
    "F32": np.float32,
    "I32": np.int32,
    "U32": np.uint32,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
    "C64": np.complex64,
}
ITEM_SIZES = {name: np.dtype(dtype).itemsize for name, dtype in NUMPY_TYPES.items()}


@dataclass(frozen=True)
class TensorSlice:
    """A box of a tensor: `shape` elements from `offset` on, in the tensor of `global_shape`."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class ShardLayout:
    """The positions of the slices in one shard: `starts` are absolute byte offsets in the file that begins with `header`."""

    header: bytes
    pieces: tuple[TensorSlice, ...]
    starts: tuple[int, ...]
    size: int


def lay_out(pieces: Iterable[TensorSlice]) -> ShardLayout:
    ordered = tuple(sorted(pieces, key=lambda piece: (-ITEM_SIZES[piece.dtype], piece.name)))
    entries: dict[str, object] = {}
    position = 0
    begins = []
    for piece in ordered:
        assert piece.name not in entries, f"{piece.name} occurs twice in one shard"
        begins.append(position)
        entries[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [position, position + piece.nbytes],
        }
        position += piece.nbytes
    sharding = {p.name: {"saved_offsets": list(p.offset), "global_shape": list(p.global_shape)} for p in ordered}
    entries["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    header = struct.pack("<Q", len(text)) + text
    return ShardLayout(header, ordered, tuple(len(header) + begin for begin in begins), len(header) + position)


def read_layout(content: memoryview, origin: str) -> ShardLayout:
    """The layout that a shard's own header describes; `origin` names it in errors."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        if length > min(LARGEST_HEADER, len(content) - 8):
            raise ValueError("header length")
        header = bytes(content[: 8 + length])
        entries = json.loads(header[8:])
        sharding = json.loads(entries.pop("__metadata__")["DCP_SHARDING_INFO"])
        pieces, starts = [], []
        for name, entry in entries.items():
            where = sharding[name]
            box = (tuple(where["global_shape"]), tuple(where["saved_offsets"]), tuple(entry["shape"]))
            pieces.append(TensorSlice(name, entry["dtype"], *box))
            starts.append(len(header) + entry["data_offsets"][0])
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise HoldfastError(f"{origin} is not a shard of a checkpoint: its header cannot be read ({error})") from error
    size = len(header) + sum(piece.nbytes for piece in pieces)
    return ShardLayout(header, tuple(pieces), tuple(starts), size)
