"""The copy of this rank's tensor slices from the live tensors into a slot, while training goes on.

A thread copies (CPU) or drives side streams that do (CUDA). Row sums are taken from the source. Buffers, which a forward pass
may change, are duplicated first. The invariants: the thread makes the slot READY as its last action, after the whole content is
there; a source that changed while it was read (its version counter moved) leaves the slot EMPTY; an error in the thread costs
that one snapshot, which is counted and reported, and never reaches the training loop.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from holdfast.checkpoint.json_state import encode
from holdfast.checkpoint.layout import ShardLayout
from holdfast.checkpoint.state import Item
from holdfast.checkpoint.writing import rows_of
from holdfast.snapshot.memory.checksum import ROW, digest_starts, rows_in, sum_rows
from holdfast.snapshot.memory.device_copy import DeviceCopy
from holdfast.snapshot.memory.slot import NOTHING, Slot, ready_header

# small enough that the sum reads from the cache what the copy has just read from memory
STRIDE = 1 << 20
RELEASE_SECONDS = 60.0


class Copy:
    """One snapshot that is copied into a slot. `small` is the small state without the random generators."""

    def __init__(
        self, slot: Slot, sequence: int, step: int, small: dict[str, Any], random: dict[str, Any], index: int = 0
    ) -> None:
        self.slot, self.sequence, self.step, self.small, self.random = slot, sequence, step, small, random
        self.index = index
        """of the slot in its arena"""
        self.small_bytes = 0
        self.queued, self.done = threading.Event(), threading.Event()
        self.released = False
        """The tensors may change: the device does so after the last read of the copy."""
        self.late_seconds = 0.0
        """how long the device waited for this copy"""
        self.trouble: str | None = None
        self.seconds = 0.0
        self.mark: Any = None
        self.versions: list[int] = []


class Copier:
    """Copies one fixed set of slices, for every snapshot. The thread calls `on_ready(slot index, step)` when a slot is READY.

    `lane`: the streams that copy from a device; by default those of CUDA, for the tensors that are there.
    """

    def __init__(self, items: Sequence[Item], layout: ShardLayout, on_ready: Any, lane: Any = None) -> None:
        by_name = {item.name: item for item in items}
        self.layout = layout
        self._on_ready = on_ready
        self._tensors = [rows_of(by_name[piece.name], piece) for piece in layout.pieces]
        self._live = [by_name[piece.name].live for piece in layout.pieces]
        on_lane = [tensor.is_cuda or lane is not None for tensor in self._tensors]
        # What is not divisible is a buffer. The next forward pass may change it, as BatchNorm's does, without a new version.
        self._duplicates: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, piece in enumerate(layout.pieces):
            scattered = on_lane[index] and not self._tensors[index].is_contiguous()
            if scattered or not by_name[piece.name].divisible:
                duplicate = torch.empty_like(self._tensors[index], memory_format=torch.contiguous_format)
                self._duplicates.append((duplicate, self._tensors[index]))
                self._tensors[index] = self._live[index] = duplicate
        self._digest_starts, self._digest_rows = digest_starts(layout)
        self._on_host = [i for i, there in enumerate(on_lane) if not there]
        self.device_copy: DeviceCopy | None = None
        if on_device := [i for i, there in enumerate(on_lane) if there]:
            flat = [_flat(self._tensors[i]) for i in on_device]
            starts = [layout.starts[i] for i in on_device]
            sums = [self._digest_starts[i] for i in on_device]
            self.device_copy = DeviceCopy(flat, starts, sums, self._digest_rows, lane)
        self._checking = threading.Lock()
        """A release is not between the two halves of the check for changed tensors."""
        self._jobs: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="holdfast-copy", daemon=True)
        self._thread.start()

    def start(self, copy: Copy) -> None:
        """Begins a copy of the tensors as they are now; returns at once."""
        for duplicate, tensor in self._duplicates:
            duplicate.copy_(tensor)
        copy.versions = self.versions()
        if self.device_copy is not None:
            copy.mark = self.device_copy.mark()
        self._jobs.put(copy)

    def release(self, copy: Copy) -> None:
        """Orders what changes the tensors after what the device still reads of them (`copy.released`): the caller may go on.

        Not without a device, not if a tensor has changed already, not if the copy is not queued in a while.
        """
        if self.device_copy is None or copy.released or copy.done.is_set() or not copy.queued.wait(RELEASE_SECONDS):
            return
        with self._checking:
            if not self._changed(copy):
                self.device_copy.release()
                copy.released = True

    def versions(self) -> list[int]:
        """Rises when a tensor is changed in place."""
        return [tensor._version for tensor in self._live]

    def drop_slot(self, slot: Slot) -> None:
        """Drops the references to a slot whose memory is released."""
        if self.device_copy is not None:
            self.device_copy.drop_slot(slot)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (copy := self._jobs.get()) is not None:
            begin = time.perf_counter()
            try:
                self._copy(copy)
            except BaseException as error:  # `trouble` reports it to the training loop
                copy.trouble = f"{type(error).__name__}: {error}"
                copy.slot.store(NOTHING)
                if self.device_copy is not None:
                    self.device_copy.abandon()
            copy.seconds = time.perf_counter() - begin
            copy.queued.set()
            copy.done.set()

    def _copy(self, copy: Copy) -> None:
        slot = copy.slot
        if self.device_copy is not None:
            self.device_copy.queue(slot, copy.mark)
        sums = [(self._digest_starts[index], self._copy_from_host(slot, index)) for index in self._on_host]
        copy.queued.set()
        small = orjson.dumps({**copy.small, "random": encode(copy.random, "random state")})
        copy.small_bytes = len(small)
        if len(small) <= len(slot.meta):
            slot.meta[: len(small)] = np.frombuffer(small, dtype=np.uint8)
            slot.payload[: len(self.layout.header)] = np.frombuffer(self.layout.header, dtype=np.uint8)
        if self.device_copy is not None:
            copy.late_seconds = self.device_copy.finish()
        for first, rows in sums:  # after those of the device, which fill the digest
            slot.digest[first : first + len(rows)] = rows
        copy.trouble = self._trouble(copy)
        if copy.trouble:
            slot.store(NOTHING)
            return
        slot.store(ready_header(slot, copy.sequence, copy.step, copy.small_bytes, self.layout, self._digest_rows))
        self._on_ready(copy.index, copy.step)

    def _trouble(self, copy: Copy) -> str | None:
        """Why the copy cannot be used."""
        if copy.small_bytes > len(copy.slot.meta):
            return f"the small state has grown to {copy.small_bytes:,} bytes; the next snapshot gets more room"
        with self._checking:
            changed = [] if copy.released else self._changed(copy)
        if changed:
            return f"{changed[0]} ({len(changed)} tensors) changed during the copy: is commit() before the step?"
        return None

    def _changed(self, copy: Copy) -> list[str]:
        """The tensors that were changed in place since the copy began."""
        versions = self.versions()
        if versions == copy.versions:
            return []
        both = zip(self.layout.pieces, copy.versions, versions, strict=True)
        return [piece.name for piece, before, now in both if before != now]

    def _copy_from_host(self, slot: Slot, index: int) -> NDArray[np.int64]:
        """Copies one tensor; returns its row sums."""
        source = _flat(self._tensors[index]).numpy()
        start = self.layout.starts[index]
        target = slot.payload[start : start + len(source)]
        sums = np.empty(rows_in(len(source)), dtype=np.int64)
        for begin in range(0, len(source), STRIDE):
            part = source[begin : begin + STRIDE]
            target[begin : begin + STRIDE] = part
            sum_rows(part, sums[begin // ROW :])
        return sums


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order; a view if its memory is in that order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
