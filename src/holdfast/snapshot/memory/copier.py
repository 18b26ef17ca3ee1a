"""The copy of this rank's tensor slices from the live tensors into a slot, while training goes on.

A thread copies (CPU) or drives a side stream that does (CUDA). Row sums are taken from the source. Buffers, which a forward pass
may change, are duplicated first. The invariants: the thread makes the slot READY as its last action, after the whole content is
there; a source that changed while it was copied (its version counter moved) leaves the slot EMPTY; an error in the thread costs
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
from holdfast.snapshot.memory.checksum import ROW, digest_starts, rows_in, sum_rows, sum_tail, sum_whole_rows_on_device
from holdfast.snapshot.memory.slot import NOTHING, Slot, ready_header

# small enough that the sum reads from the cache what the copy has just read from memory
STRIDE = 1 << 20


class Copy:
    """One snapshot that is copied into a slot. `small` is the small state without the random generators."""

    def __init__(
        self, slot: Slot, sequence: int, step: int, small: dict[str, Any], random: dict[str, Any], index: int = 0
    ) -> None:
        self.slot, self.sequence, self.step, self.small, self.random = slot, sequence, step, small, random
        self.index = index
        """of the slot in its arena"""
        self.small_bytes = 0
        self.done = threading.Event()
        self.trouble: str | None = None
        self.seconds = 0.0
        self.ready_event: Any = None


class Copier:
    """Copies one fixed set of slices, for every snapshot. The thread calls `on_ready(slot index, step)` when a slot is READY."""

    def __init__(self, items: Sequence[Item], layout: ShardLayout, on_ready: Any) -> None:
        by_name = {item.name: item for item in items}
        self.layout = layout
        self._on_ready = on_ready
        self._tensors = [rows_of(by_name[piece.name], piece) for piece in layout.pieces]
        # What is not divisible is a buffer. The next forward pass may change it, as BatchNorm's does, without a new version.
        self._duplicates: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, piece in enumerate(layout.pieces):
            if not by_name[piece.name].divisible:
                duplicate = torch.empty_like(self._tensors[index])
                self._duplicates.append((duplicate, self._tensors[index]))
                self._tensors[index] = duplicate
        self._digest_starts, self._digest_rows = digest_starts(layout)
        self._on_device = [i for i, tensor in enumerate(self._tensors) if tensor.is_cuda]
        self._on_host = [i for i, tensor in enumerate(self._tensors) if not tensor.is_cuda]
        self._device = self._tensors[self._on_device[0]].device if self._on_device else None
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)
            # Of higher priority: many small kernels would otherwise each wait for the training's large ones.
            self._summing = torch.cuda.Stream(self._device, priority=-1)
            self._sums = torch.zeros(self._digest_rows, dtype=torch.int64, device=self._device)
            self._flat = {i: _flat(t) for i in self._on_device if (t := self._tensors[i]).is_contiguous()}
            self._targets: dict[Slot, list[torch.Tensor]] = {}
        self._jobs: queue.SimpleQueue[tuple[Copy, list[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="holdfast-copy", daemon=True)
        self._thread.start()

    def start(self, copy: Copy) -> None:
        """Begins a copy of the tensors as they are now; returns at once."""
        for duplicate, buffer in self._duplicates:
            duplicate.copy_(buffer)
        if self._device is not None:
            copy.ready_event = torch.cuda.Event()
            copy.ready_event.record(torch.cuda.current_stream(self._device))
        self._jobs.put((copy, self.versions()))

    def versions(self) -> list[int]:
        """Rises when a tensor is changed in place."""
        return [tensor._version for tensor in self._tensors]

    def drop_slot(self, slot: Slot) -> None:
        """Drops the references to a slot whose memory is released."""
        if self._device is not None:
            self._targets.pop(slot, None)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, versions = job
            begin = time.perf_counter()
            try:
                self._copy(copy, versions)
            except BaseException as error:  # `trouble` reports it to the training loop
                copy.trouble = f"{type(error).__name__}: {error}"
                copy.slot.store(NOTHING)
            copy.seconds = time.perf_counter() - begin
            copy.done.set()

    def _copy(self, copy: Copy, versions: list[int]) -> None:
        slot = copy.slot
        small = orjson.dumps({**copy.small, "random": encode(copy.random, "random state")})
        copy.small_bytes = len(small)
        if len(small) > len(slot.meta):
            copy.trouble = f"the small state has grown to {len(small):,} bytes; the next snapshot gets more room"
            slot.store(NOTHING)
            return
        slot.meta[: len(small)] = np.frombuffer(small, dtype=np.uint8)
        slot.payload[: len(self.layout.header)] = np.frombuffer(self.layout.header, dtype=np.uint8)
        if self._device is not None:
            self._copy_from_device(copy)
        for index in self._on_host:
            self._copy_from_host(slot, index)
        if self.versions() != versions:
            changed = [
                p.name for p, was, now in zip(self.layout.pieces, versions, self.versions(), strict=True) if was != now
            ]
            copy.trouble = (
                f"{changed[0]} ({len(changed)} tensors) changed during the copy: is commit() before the step?"
            )
            slot.store(NOTHING)
            return
        slot.store(ready_header(slot, copy.sequence, copy.step, copy.small_bytes, self.layout))
        self._on_ready(copy.index, copy.step)

    def _span(self, slot: Slot, index: int) -> NDArray[np.uint8]:
        start = self.layout.starts[index]
        return slot.payload[start : start + self.layout.pieces[index].nbytes]

    def _copy_from_host(self, slot: Slot, index: int) -> None:
        source = _flat(self._tensors[index]).numpy()
        target = self._span(slot, index)
        first = self._digest_starts[index]
        sums = slot.digest[first : first + rows_in(len(source))]
        for begin in range(0, len(source), STRIDE):
            part = source[begin : begin + STRIDE]
            target[begin : begin + STRIDE] = part
            sum_rows(part, sums[begin // ROW :])

    def _copy_from_device(self, copy: Copy) -> None:
        slot = copy.slot
        torch.cuda.set_device(self._device)
        targets = self._targets_in(slot)
        finished = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copy.ready_event)
            sources = [self._flat[i] if i in self._flat else _flat(self._tensors[i]) for i in self._on_device]
            self._summing.wait_stream(self._stream)
            torch._foreach_copy_(targets, sources, non_blocking=True)
        with torch.cuda.stream(self._summing):
            for index, source in zip(self._on_device, sources, strict=True):
                first = self._digest_starts[index]
                sum_whole_rows_on_device(source, self._sums[first:])
            host_sums = torch.from_numpy(slot.digest[: self._digest_rows])
            host_sums.copy_(self._sums, non_blocking=True)
        self._stream.wait_stream(self._summing)
        finished.record(self._stream)
        finished.synchronize()
        for index in self._on_device:
            nbytes = self.layout.pieces[index].nbytes
            if nbytes % ROW:
                row = self._digest_starts[index] + nbytes // ROW
                slot.digest[row] = sum_tail(self._span(slot, index)[nbytes // ROW * ROW :])

    def _targets_in(self, slot: Slot) -> list[torch.Tensor]:
        """The slot's memory as tensors that the device writes to directly."""
        if slot not in self._targets:
            slot.register(self._device)
            self._targets[slot] = [torch.from_numpy(self._span(slot, index)) for index in self._on_device]
        return self._targets[slot]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order; a view if its memory is in that order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
