"""Memory that outlives the trainer: a file on a memory file system, with slots that each hold one whole snapshot of one rank.

    page 0          arena header: what run, rank, plan; sizes; its checksum
    page 1          per slot: pins, and the sequence number that the keeper has verified
    slot 0, 1, (…)  see slot.py

The invariants: the file appears by rename when its memory is reserved, and no trainer unlinks it; slots 0 and 1 are reserved at
creation, the others take memory only while slots are pinned (to be written to disk, or copied to another node).
"""

import ctypes
import errno
import mmap
import os
import struct
from pathlib import Path

from holdfast.checkpoint.layout import PAGE
from holdfast.snapshot.memory.slot import (
    EMPTY,
    HEADER_BYTES,
    MAGIC,
    NOTHING,
    READY,
    DamagedError,
    Sizes,
    Slot,
    SlotHeader,
    meta_bytes_for,
    unpack_header,
    with_checksum,
)
from holdfast.system.atomic_files import rename_into_place, temporary_beside
from holdfast.system.descriptors import open_private, pwrite_all
from holdfast.system.errors import HoldfastError

SLOTS = 5
RESERVED = 2
DISK, PEER, KEEPER = 0, 1, 2
"""why a slot is pinned: a save that a trainer asked for, copies to another node, the keeper's own writing"""

_ARENA = struct.Struct("<8sII32s32sQQQQ")
_PINS, _VERIFIED = PAGE, PAGE + 64
_FIRST_SLOT = 2 * PAGE
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01


class Arena:
    """The memory file of one rank: open one, or create it for a layout."""

    def __init__(self, path: Path, populate: bool = False) -> None:
        self.path, self.populate = path, populate
        self._descriptor = open_private(path, os.O_RDWR)
        try:
            self._words = mmap.mmap(self._descriptor, _FIRST_SLOT)
            raw = bytes(self._words[: _ARENA.size + 8])
            magic, self.rank, self.world, run, plan, *sizes, self.generation = _ARENA.unpack(raw[: _ARENA.size])
            if magic != MAGIC or raw != with_checksum(raw[: _ARENA.size]):
                raise DamagedError(f"{path} is not an arena, or its header is damaged")
            self.sizes = Sizes(*sizes)
            if os.fstat(self._descriptor).st_size < file_bytes(self.sizes, SLOTS):
                raise DamagedError(f"{path} is truncated")  # a read beyond its end would end the process with SIGBUS
        except (ValueError, OSError, struct.error) as error:
            os.close(self._descriptor)
            raise DamagedError(f"{path} is not an arena ({error})") from error
        except DamagedError:
            os.close(self._descriptor)
            raise
        self._verified = memoryview(self._words).cast("Q")
        self.run, self.plan = run.decode(), plan.decode()
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
        content: "Arena | None" = None,
    ) -> "Arena":
        """Reserves the memory for two slots, copies the slots of `content`, and gives the file its name when it is whole."""
        temporary = temporary_beside(path)
        descriptor = open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(descriptor, file_bytes(sizes, SLOTS))
            os.posix_fallocate(descriptor, 0, file_bytes(sizes, RESERVED))
            pwrite_all(descriptor, _pack_arena(rank, world, run, plan, sizes, generation), 0)
            if content is not None:
                cls._copy_slots(temporary, content)
            rename_into_place(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                raise HoldfastError(f"no room for {file_bytes(sizes, RESERVED):,} bytes in {path.parent}") from error
            raise
        finally:
            os.close(descriptor)
        return cls(path, populate)

    @classmethod
    def _copy_slots(cls, path: Path, content: "Arena") -> None:
        arena = cls(path)
        for index, header in enumerate(content.headers()):
            if header.state != READY:
                continue
            if not arena.reserve(index):
                raise OSError(errno.ENOSPC, "fallocate", str(path))
            arena.slot(index).copy_from(content.slot(index))
            arena.pin(index, content.pinned(index, PEER), PEER)
        arena.close()

    def grown(self, small_bytes: int) -> "Arena":
        """The same arena with room for a larger small state, in place of this one, which is closed. The file's name always leads
        to a whole arena."""
        sizes = Sizes(meta_bytes_for(small_bytes, self.sizes.payload), self.sizes.digest, self.sizes.payload)
        arena = Arena.create(
            self.path, sizes, self.run, self.plan, self.rank, self.world, self.generation, self.populate, content=self
        )
        self.close()
        return arena

    def set_generation(self, generation: int) -> None:
        raw = _pack_arena(self.rank, self.world, self.run, self.plan, self.sizes, generation)
        self._words[: len(raw)] = raw
        self.generation = generation

    def slot(self, index: int) -> Slot:
        if index not in self._slots:
            offset = file_bytes(self.sizes, index)
            origin = f"{self.path} slot {index}"
            self._slots[index] = Slot(self._descriptor, offset, self.sizes, origin, self.populate and index < RESERVED)
        return self._slots[index]

    def read_payload(self, index: int, begin: int, buffer: memoryview) -> None:
        """Reads a part of a slot's payload into the buffer, without mapping it."""
        offset = file_bytes(self.sizes, index) + PAGE + self.sizes.meta + self.sizes.digest + begin
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if not count:
                raise DamagedError(f"{self.path} is truncated")
            done += count

    def headers(self) -> list[SlotHeader]:
        """The headers of all slots; one that takes no memory is EMPTY."""
        return [unpack_header(self._raw_header(index)) for index in range(SLOTS)]

    def damaged_headers(self) -> list[int]:
        """Slots whose header is neither valid nor empty memory."""
        return [i for i in range(SLOTS) if unpack_header(raw := self._raw_header(i)) is NOTHING and any(raw)]

    def _raw_header(self, index: int) -> bytes:
        # Read, not mapped: a load from a mapped page of a slot without memory would allocate it, or end in SIGBUS.
        return os.pread(self._descriptor, HEADER_BYTES, file_bytes(self.sizes, index))

    def ready_steps(self) -> set[int]:
        return {header.step for header in self.headers() if header.state == READY}

    def pin(self, index: int, pinned: bool, why: int = DISK) -> None:
        """Keeps a slot from being overwritten, or no longer. Each reason has a byte of its own."""
        self._words[_PINS + SLOTS * why + index] = int(pinned)

    def pinned(self, index: int, why: int | None = None) -> bool:
        reasons = (DISK, PEER, KEEPER) if why is None else (why,)
        return any(self._words[_PINS + SLOTS * reason + index] for reason in reasons)

    def set_verified(self, index: int, sequence: int) -> None:
        self._verified[_VERIFIED // 8 + index] = sequence

    def verified(self, index: int) -> int:
        """The sequence number of the snapshot in this slot that the keeper has verified; 0 for none."""
        return self._verified[_VERIFIED // 8 + index]

    def reserve(self, index: int) -> bool:
        """Allocates the memory of a slot, which the first two have from the beginning; False if there is none."""
        try:
            if index >= RESERVED:
                os.posix_fallocate(self._descriptor, file_bytes(self.sizes, index), self.sizes.stride)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return True

    def release(self, index: int) -> None:
        """Releases the memory of a slot; its content reads as zeros, which is EMPTY."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        begin, length = file_bytes(self.sizes, index), self.sizes.stride
        self._slots.pop(index, None)
        if libc.fallocate(self._descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, length) != 0:
            raise OSError(ctypes.get_errno(), "fallocate", str(self.path))

    def empty_except(self, step: int | None) -> None:
        """Empties the slots that hold another step: a run does not continue from them."""
        for index, header in enumerate(self.headers()):
            if header.state != EMPTY and header.step != step:
                self.slot(index).store(NOTHING)
            for why in (DISK, PEER):  # KEEPER is the keeper's own: it may be writing this step
                self.pin(index, False, why)

    def is_removed(self) -> bool:
        """Whether the file has no name any more: this process still has the memory, and no other one finds it."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Closes the file; memory is unmapped when the last array on it is gone."""
        for slot in self._slots.values():
            slot.unregister()
        self._slots.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def file_bytes(sizes: Sizes, slots: int) -> int:
    """The bytes of an arena up to the end of this many slots, and so the offset of the next one."""
    return _FIRST_SLOT + slots * sizes.stride


def slots_at_most(copied: bool) -> int:
    """How many slots' memory a node may need: one more than reserved while it saves; if nodes copy to each other, all slots, and
    two for the copies of another node."""
    return SLOTS + 2 if copied else RESERVED + 1


def arena_name(rank: int, world: int, plan: str) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.{plan[:8]}.arena"


def _pack_arena(rank: int, world: int, run: str, plan: str, sizes: Sizes, generation: int) -> bytes:
    sized = (sizes.meta, sizes.digest, sizes.payload)
    return with_checksum(_ARENA.pack(MAGIC, rank, world, run.encode(), plan.encode(), *sized, generation))
