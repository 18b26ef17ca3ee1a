"""Memory that outlives the trainer: a file on a memory file system, with slots that each hold one whole snapshot of one rank.

    page 0          arena header: what run, rank, plan; sizes; its checksum
    page 1          words of the keeper: a pin per slot, the sequence number it has verified per slot
    slot 0, 1, (…)  page: slot header | small state as JSON | row sums | the shard exactly as it would be on disk

The invariants: a slot is WRITING before its content is touched and READY after all of it is there, by one store of a header that
carries its own checksum; so a kill at any instant leaves a slot that says what it is. Slots 0 and 1 are reserved at creation;
the others take memory only while slots are pinned (to be written to disk, or copied to another node). The file is never
unlinked by a trainer.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from holdfast.checkpoint.layout import PAGE, ShardLayout, TensorSlice, read_layout
from holdfast.snapshot.memory.checksum import ROW, digest_starts, rows_in, sum_rows
from holdfast.system.atomic_files import rename_into_place, temporary_beside
from holdfast.system.descriptors import open_private, pwrite_all
from holdfast.system.errors import HoldfastError

MAGIC = b"HFARENA2"
SLOTS = 5
RESERVED = 2
EMPTY, WRITING, READY = 0, 1, 2
DISK, PEER, KEEPER = 0, 1, 2
"""who keeps a slot from being overwritten: a save that a trainer asked for, copies to another node, the keeper's own writing"""
STATES = {EMPTY: "empty", WRITING: "writing", READY: "ready"}
META_ROOM = 64 << 10
VERIFY_SPAN = 4 << 20

_ARENA = struct.Struct("<8sII32s32sQQQQ")
_SLOT = struct.Struct("<8sIIQqQQQQd")
_PINS, _VERIFIED = PAGE, PAGE + 64
_FIRST_SLOT = 2 * PAGE
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01


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
        body = _SLOT.pack(
            MAGIC,
            1,
            self.state,
            self.sequence,
            self.step,
            self.meta_bytes,
            self.meta_hash,
            self.digest_hash,
            self.head_hash,
            self.time,
        )
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


NOTHING = SlotHeader(EMPTY, 0, 0, 0, 0, 0, 0, 0.0)


def unpack_header(raw: bytes) -> SlotHeader:
    body, (checksum,) = raw[: _SLOT.size], struct.unpack("<Q", raw[_SLOT.size :])
    magic, version, *fields = _SLOT.unpack(body)
    if magic != MAGIC or version != 1 or checksum != xxhash.xxh3_64_intdigest(body):
        return NOTHING
    return SlotHeader(*fields)


@dataclass(frozen=True)
class Sizes:
    """The regions of a slot, each a whole number of pages."""

    meta: int
    digest: int
    payload: int

    @property
    def stride(self) -> int:
        return PAGE + self.meta + self.digest + self.payload

    def file(self, slots: int) -> int:
        return _FIRST_SLOT + slots * self.stride


def sizes_for(layout: ShardLayout, small_bytes: int) -> Sizes:
    return Sizes(_room_for(small_bytes, layout.size), _pages(8 * digest_starts(layout)[1]), _pages(layout.size))


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
        """Makes the memory known to CUDA, once: the device then reads and writes it directly. It works, slowly, without."""
        import torch

        with self._registering, torch.cuda.device(device):
            if not self._registered:
                result = torch.cuda.cudart().cudaHostRegister(self.whole.ctypes.data, len(self.whole), 0)
                self._registered = int(result) == 0

    def unregister(self) -> None:
        """CUDA lets go of memory that is given back: it would go on writing to the pages that were there."""
        with self._registering:
            if self._registered:
                import torch

                torch.cuda.cudart().cudaHostUnregister(self.whole.ctypes.data)
                self._registered = False

    def take_over(self, other: "Slot") -> None:
        """Makes this slot hold what another one holds; there may be more room for the small state in it."""
        self.meta[: len(other.meta)] = other.meta
        self.digest[:] = other.digest
        self.payload[:] = other.payload
        self.store(other.header())

    def header(self) -> SlotHeader:
        """What the slot says it is; a header that is torn or damaged counts as EMPTY."""
        return unpack_header(bytes(self.whole[: _SLOT.size + 8]))

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

    def verify(self, header: SlotHeader, share: int = 0, of: int = 1, threads: int = 1) -> None:
        """Recomputes this share of the row sums from the bytes held; raises DamagedError for the first tensor that differs."""
        self.small_state(header)
        layout = self.layout(header)
        starts, total = digest_starts(layout)
        sums = self.digest[:total]
        if xxhash.xxh3_64_intdigest(sums.data) != header.digest_hash:
            raise DamagedError(f"{self.origin}: the row sums of step {header.step} do not match their checksum")
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
        wanted = sums[begin // ROW : rows_in(end)].copy()  # the memory may be in use again: compare one reading
        found = np.empty_like(wanted)
        sum_rows(self.payload[start + begin : start + end], found)
        if not np.array_equal(found, wanted):
            at = begin + ROW * int(np.flatnonzero(found != wanted)[0])
            raise DamagedError(
                f"{self.origin}: {piece.name} of step {header.step} is damaged in the 4 KiB from byte {at:,}"
            )


class Arena:
    """The memory file of one rank: open one, or create it for a layout."""

    def __init__(self, path: Path, populate: bool = False) -> None:
        self.path, self.populate = path, populate
        self._descriptor = open_private(path, os.O_RDWR)
        try:
            self._words = mmap.mmap(self._descriptor, _FIRST_SLOT)
            raw = bytes(self._words[: _ARENA.size + 8])
            body, (checksum,) = raw[: _ARENA.size], struct.unpack("<Q", raw[_ARENA.size :])
            magic, self.rank, self.world, run, plan, meta, digest, payload, self.generation = _ARENA.unpack(body)
            if magic != MAGIC or checksum != xxhash.xxh3_64_intdigest(body):
                raise DamagedError(f"{path} is not an arena, or its header is damaged")
            if os.fstat(self._descriptor).st_size < Sizes(meta, digest, payload).file(SLOTS):
                raise DamagedError(f"{path} is truncated")  # to read beyond its end would end the process with SIGBUS
        except (ValueError, OSError, struct.error) as error:
            os.close(self._descriptor)
            raise DamagedError(f"{path} is not an arena ({error})") from error
        except DamagedError:
            os.close(self._descriptor)
            raise
        self._verified = memoryview(self._words).cast("Q")
        self.run, self.plan = run.decode(), plan.decode()
        self.sizes = Sizes(meta, digest, payload)
        self._slots: dict[int, Slot] = {}

    @classmethod
    def create(
        cls,
        path: Path,
        sizes: Sizes,
        run: str,
        plan: str,
        rank: int,
        world: int,
        generation: int,
        populate: bool = True,
        holding: "Arena | None" = None,
    ) -> "Arena":
        """Reserves the memory for two slots, fills in what `holding` holds, and gives the file its name when it is whole."""
        temporary = temporary_beside(path)
        descriptor = open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(descriptor, sizes.file(SLOTS))
            os.posix_fallocate(descriptor, 0, sizes.file(RESERVED))
            pwrite_all(descriptor, _pack_arena(rank, world, run, plan, sizes, generation), 0)
            if holding is not None:
                cls._take_over(temporary, holding)
            rename_into_place(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                raise HoldfastError(f"no room for {sizes.file(RESERVED):,} bytes in {path.parent}") from error
            raise
        finally:
            os.close(descriptor)
        return cls(path, populate)

    @classmethod
    def _take_over(cls, path: Path, holding: "Arena") -> None:
        arena = cls(path)
        for index, header in enumerate(holding.headers()):
            if header.state != READY:
                continue
            if not arena.reserve(index):
                raise OSError(errno.ENOSPC, "fallocate", str(path))
            arena.slot(index).take_over(holding.slot(index))
            arena.pin(index, holding.pinned(index, PEER), PEER)
        arena.close()

    def grown(self, small_bytes: int) -> "Arena":
        """The same arena with room for a larger small state, in place of this one, which is closed. At no time is what it holds
        not there under its name."""
        sizes = Sizes(_room_for(small_bytes, self.sizes.payload), self.sizes.digest, self.sizes.payload)
        arena = Arena.create(
            self.path, sizes, self.run, self.plan, self.rank, self.world, self.generation, self.populate, holding=self
        )
        self.close()
        return arena

    def set_generation(self, generation: int) -> None:
        raw = _pack_arena(self.rank, self.world, self.run, self.plan, self.sizes, generation)
        self._words[: len(raw)] = raw
        self.generation = generation

    def slot(self, index: int) -> Slot:
        if index not in self._slots:
            offset = _FIRST_SLOT + index * self.sizes.stride
            origin = f"{self.path} slot {index}"
            self._slots[index] = Slot(self._descriptor, offset, self.sizes, origin, self.populate and index < RESERVED)
        return self._slots[index]

    def headers(self) -> list[SlotHeader]:
        """The headers of all slots; one that takes no memory is EMPTY."""
        return [self._header(index) for index in range(SLOTS)]

    def damaged_headers(self) -> list[int]:
        """Slots whose header is neither one that was stored nor empty memory."""
        return [i for i in range(SLOTS) if unpack_header(raw := self._raw_header(i)) is NOTHING and any(raw)]

    def _header(self, index: int) -> SlotHeader:
        return unpack_header(self._raw_header(index))

    def _raw_header(self, index: int) -> bytes:
        # Read, not mapped: to look at a page of a slot that takes no memory would allocate it, or end in SIGBUS if none is left.
        return os.pread(self._descriptor, _SLOT.size + 8, self.sizes.file(index))

    def ready_steps(self) -> set[int]:
        return {header.step for header in self.headers() if header.state == READY}

    def pin(self, index: int, pinned: bool, why: int = DISK) -> None:
        """Keeps a slot from being overwritten, or lets it go again. Each reason has a byte of its own."""
        self._words[_PINS + SLOTS * why + index] = int(pinned)

    def pinned(self, index: int, why: int | None = None) -> bool:
        reasons = (DISK, PEER, KEEPER) if why is None else (why,)
        return any(self._words[_PINS + SLOTS * reason + index] for reason in reasons)

    def set_verified(self, index: int, sequence: int) -> None:
        self._verified[_VERIFIED // 8 + index] = sequence

    def verified(self, index: int) -> int:
        """The sequence number of the snapshot in this slot that the keeper found whole; 0 for none."""
        return self._verified[_VERIFIED // 8 + index]

    def reserve(self, index: int) -> bool:
        """Takes memory for a slot, which the first two have from the beginning; False where there is none."""
        try:
            if index >= RESERVED:
                os.posix_fallocate(self._descriptor, self.sizes.file(index), self.sizes.stride)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return True

    def release(self, index: int) -> None:
        """Gives a slot's memory back; its content reads as zeros, which is EMPTY."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        begin, length = self.sizes.file(index), self.sizes.stride
        self._slots.pop(index, None)
        if libc.fallocate(self._descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, length) != 0:
            raise OSError(ctypes.get_errno(), "fallocate", str(self.path))

    def close(self) -> None:
        """Lets go of the file; mappings go when the last array on them does."""
        for slot in self._slots.values():
            slot.unregister()
        self._slots.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def ready_header(slot: Slot, sequence: int, step: int, meta_bytes: int, layout: ShardLayout) -> SlotHeader:
    """The header of a slot whose content has been written."""
    _, total = digest_starts(layout)
    return SlotHeader(
        READY,
        sequence,
        step,
        meta_bytes,
        xxhash.xxh3_64_intdigest(slot.meta[:meta_bytes].data),
        xxhash.xxh3_64_intdigest(slot.digest[:total].data),
        xxhash.xxh3_64_intdigest(layout.header),
        time.time(),
    )


def forget(arena: Arena, keep: int | None) -> None:
    """Empties the slots that hold anything but the step `keep`: what a run did not resume from has no future."""
    for index, header in enumerate(arena.headers()):
        if header.state != EMPTY and header.step != keep:
            arena.slot(index).store(NOTHING)
        for why in (DISK, PEER):  # KEEPER is the keeper's own: it may be writing this step
            arena.pin(index, False, why)


def slots_at_most(copied: bool) -> int:
    """How many slots' memory a node may need: one more than reserved while it saves; where nodes copy to each other, all there
    are, and the two that hold another node's."""
    return SLOTS + 2 if copied else RESERVED + 1


def arena_name(rank: int, world: int, plan: str) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.{plan[:8]}.arena"


def _room_for(small_bytes: int, payload: int) -> int:
    """A rank's small state may grow to four times what it is now and some more: as much as the row sums take, if that is much."""
    return _pages(4 * small_bytes + max(META_ROOM, payload // 512))


def _pack_arena(rank: int, world: int, run: str, plan: str, sizes: Sizes, generation: int) -> bytes:
    body = _ARENA.pack(
        MAGIC, rank, world, run.encode(), plan.encode(), sizes.meta, sizes.digest, sizes.payload, generation
    )
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
