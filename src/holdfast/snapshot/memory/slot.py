"""One slot of an arena: a whole snapshot of one rank, in mapped memory.

    page                slot header, with its own checksum
    whole pages each    small state as JSON | row sums | the shard exactly as it would be on disk

The invariant: a slot is WRITING before its content is touched and READY after all of it is there, by one store of the header; a
torn or damaged header reads as EMPTY.
"""

import mmap
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from holdfast.checkpoint.layout import PAGE, ShardLayout, TensorSlice, read_layout
from holdfast.snapshot.memory.checksum import ROW, digest_starts, rows_in, sum_rows
from holdfast.system.errors import HoldfastError

MAGIC = b"HFARENA2"
EMPTY, WRITING, READY = 0, 1, 2
STATES = {EMPTY: "empty", WRITING: "writing", READY: "ready"}
MIN_META_BYTES = 64 << 10
VERIFY_SPAN = 4 << 20
_SLOT = struct.Struct("<8sIIQqQQQQd")
HEADER_BYTES = _SLOT.size + 8


class DamagedError(HoldfastError):
    """A snapshot whose bytes are not what was copied."""


@dataclass(frozen=True)
class SlotHeader:
    state: int
    sequence: int
    """rises with every snapshot of a rank, over restarts"""
    step: int
    meta_bytes: int
    meta_hash: int
    digest_hash: int
    head_hash: int
    """of the safetensors header"""
    time: float

    def pack(self) -> bytes:
        return with_checksum(_SLOT.pack(MAGIC, 1, *vars(self).values()))


NOTHING = SlotHeader(EMPTY, 0, 0, 0, 0, 0, 0, 0.0)


def unpack_header(raw: bytes) -> SlotHeader:
    """What the bytes of a header say; NOTHING if they are torn, damaged or empty memory."""
    magic, version, *fields = _SLOT.unpack(raw[: _SLOT.size])
    if magic != MAGIC or version != 1 or raw != with_checksum(raw[: _SLOT.size]):
        return NOTHING
    return SlotHeader(*fields)


def with_checksum(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@dataclass(frozen=True)
class Sizes:
    """The regions of a slot, each a whole number of pages."""

    meta: int
    digest: int
    payload: int

    @property
    def stride(self) -> int:
        return PAGE + self.meta + self.digest + self.payload


def sizes_for(layout: ShardLayout, small_bytes: int) -> Sizes:
    return Sizes(meta_bytes_for(small_bytes, layout.size), _pages(8 * digest_starts(layout)[1]), _pages(layout.size))


def meta_bytes_for(small_bytes: int, payload: int) -> int:
    """Room for a small state that grows to four times its size, and 64 KiB or 1/512 of the payload more."""
    return _pages(4 * small_bytes + max(MIN_META_BYTES, payload // 512))


class Slot:
    """One mapped slot. Numpy arrays on it are views of the shared memory."""

    def __init__(self, descriptor: int, offset: int, sizes: Sizes, origin: str, populate: bool) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self.map = mmap.mmap(descriptor, sizes.stride, flags=flags, offset=offset)
        self.origin = origin
        self._registering, self._registered = threading.Lock(), False
        whole = np.frombuffer(self.map, dtype=np.uint8)
        self.whole = whole
        self.meta = whole[PAGE : PAGE + sizes.meta]
        self.digest = whole[PAGE + sizes.meta : PAGE + sizes.meta + sizes.digest].view(np.int64)
        self.payload = whole[PAGE + sizes.meta + sizes.digest :]

    def register(self, device: Any) -> None:
        """Registers the memory with CUDA, once: the device then reads and writes it directly. Without it, copies are slower."""
        import torch

        with self._registering, torch.cuda.device(device):
            if not self._registered:
                result = torch.cuda.cudart().cudaHostRegister(self.whole.ctypes.data, len(self.whole), 0)
                self._registered = int(result) == 0

    def unregister(self) -> None:
        """Before memory is released: CUDA would go on writing to the pages that were there."""
        with self._registering:
            if self._registered:
                import torch

                torch.cuda.cudart().cudaHostUnregister(self.whole.ctypes.data)
                self._registered = False

    def copy_from(self, other: "Slot") -> None:
        """Copies the content of another slot; this one may have more room for the small state."""
        self.meta[: len(other.meta)] = other.meta
        self.digest[:] = other.digest
        self.payload[:] = other.payload
        self.store(other.header())

    def header(self) -> SlotHeader:
        """The slot's header; a torn or damaged one counts as EMPTY."""
        return unpack_header(bytes(self.whole[:HEADER_BYTES]))

    def store(self, header: SlotHeader) -> None:
        raw = header.pack()
        self.map[: len(raw)] = raw

    def small_state(self, header: SlotHeader) -> dict[str, Any]:
        raw = bytes(self.meta[: header.meta_bytes])
        if header.meta_bytes > len(self.meta) or xxhash.xxh3_64_intdigest(raw) != header.meta_hash:
            raise DamagedError(f"{self.origin}: the small state of step {header.step} does not match its checksum")
        value: dict[str, Any] = orjson.loads(raw)
        return value

    def layout(self, header: SlotHeader) -> ShardLayout:
        """The layout of the payload, from its own (verified) header."""
        (length,) = struct.unpack("<Q", bytes(self.payload[:8]))
        head = bytes(self.payload[: min(8 + length, len(self.payload))])
        if xxhash.xxh3_64_intdigest(head) != header.head_hash:
            raise DamagedError(f"{self.origin}: the table of tensors of step {header.step} does not match its checksum")
        return read_layout(self.payload.data, self.origin)

    def verified_tables(self, header: SlotHeader) -> tuple[ShardLayout, list[int], NDArray[np.int64]]:
        """Compares everything but the tensors with its checksum; returns the layout, the index of each tensor's first row sum,
        and the row sums."""
        self.small_state(header)
        layout = self.layout(header)
        starts, total = digest_starts(layout)
        sums = self.digest[:total]
        if xxhash.xxh3_64_intdigest(sums.data) != header.digest_hash:
            raise DamagedError(f"{self.origin}: the row sums of step {header.step} do not match their checksum")
        return layout, starts, sums

    def verify(self, header: SlotHeader, share: int = 0, of: int = 1, threads: int = 1) -> None:
        """Recomputes this share of the row sums from the bytes held; raises DamagedError for the first tensor that differs."""
        layout, starts, sums = self.verified_tables(header)
        spans = [
            (piece, layout.starts[index], sums[starts[index] :], begin)
            for index, piece in enumerate(layout.pieces)
            for begin in range(0, piece.nbytes, VERIFY_SPAN)
        ]
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda span: self._verify_span(header, *span), spans[share::of]):
                pass

    def _verify_span(
        self, header: SlotHeader, piece: TensorSlice, start: int, sums: NDArray[np.int64], begin: int
    ) -> None:
        end = min(piece.nbytes, begin + VERIFY_SPAN)
        expected = sums[begin // ROW : rows_in(end)].copy()  # one reading: training may overwrite the slot
        found = np.empty_like(expected)
        sum_rows(self.payload[start + begin : start + end], found)
        if not np.array_equal(found, expected):
            at = begin + ROW * int(np.flatnonzero(found != expected)[0])
            raise DamagedError(
                f"{self.origin}: {piece.name} of step {header.step} is damaged in the 4 KiB from byte {at:,}"
            )


def ready_header(slot: Slot, sequence: int, step: int, meta_bytes: int, layout: ShardLayout, rows: int) -> SlotHeader:
    """The header of a slot whose content, with this many row sums, has been written."""
    return SlotHeader(
        READY,
        sequence,
        step,
        meta_bytes,
        xxhash.xxh3_64_intdigest(slot.meta[:meta_bytes].data),
        xxhash.xxh3_64_intdigest(slot.digest[:rows].data),
        xxhash.xxh3_64_intdigest(layout.header),
        time.time(),
    )


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
