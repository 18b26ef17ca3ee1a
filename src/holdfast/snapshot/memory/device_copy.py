"""The copy of tensors on a device into a slot, on a side stream, with row sums that the device computes.

All copies are queued when a snapshot begins. `release` makes the training's stream wait for them before it changes a tensor; the
host does not wait. Where the copy takes longer than the forward and backward pass, the last groups of tensors are duplicated on
the device instead, and copied from there while the next step runs. The invariants: every byte and every row sum of a copy is read
from the tensors as they were at its mark; the training's stream changes them only after the last such read.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from holdfast import kernels
from holdfast.snapshot.memory.checksum import sum_rows_on_device
from holdfast.snapshot.memory.slot import Slot

GROUP_BYTES = 32 << 20
SPARE_SHARE = 0.25
"""of the device memory that is free when duplicates are needed"""
IN_FLIGHT = 2
"""Late groups that are queued at a time: the training's own copies to the host, such as that of the loss, wait for them."""
LATE_SECONDS, EARLY_GROUPS = 0.0002, 3
"""How late the copy may be, and how early, before more or fewer groups are duplicated."""


class CudaLane:
    """The CUDA streams of a copy. A mark is a point in the order of a stream's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.copying = torch.cuda.Stream(device)
        # Of higher priority: a small kernel would otherwise wait for the training's large ones.
        self.summing = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> Any:
        """The end of the work that the training's stream has been given."""
        return recorded(torch.cuda.current_stream(self._device))

    def begin(self, mark: Any) -> None:
        """Waits until the device reaches the mark. By then the training thread has launched its next kernels: it does not have
        to wait for the interpreter, which this thread uses from now on."""
        torch.cuda.set_device(self._device)
        mark.synchronize()

    def register(self, slot: Slot) -> None:
        slot.register(self._device)

    def sum(self, row_sums: Any, sums: torch.Tensor, digest: torch.Tensor) -> Any:
        with torch.cuda.stream(self.summing):
            row_sums.into(sums)
            digest.copy_(sums, non_blocking=True)
            return recorded(self.summing)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        with torch.cuda.stream(self.copying):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            return recorded(self.copying)

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds_between(self, first: Any, second: Any) -> float | None:
        """None if one of the marks has not been reached yet."""
        return 1e-3 * float(first.elapsed_time(second)) if first.query() and second.query() else None

    def train_after(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def copy_after(self, mark: Any) -> None:
        self.copying.wait_event(mark)

    def spare_bytes(self) -> int:
        """How much memory duplicates may take."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(SPARE_SHARE * free)


def recorded(stream: torch.cuda.Stream) -> Any:
    """A mark at the end of the work that a stream has been given."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


class PlainRowSums:
    """Row sums by torch's own kernels, one launch per tensor: where Triton is not installed."""

    def __init__(self, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        self._tensors, self._starts = tensors, starts

    def into(self, sums: torch.Tensor) -> None:
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            sum_rows_on_device(tensor, sums[start:])


def row_sums_of(tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> Any:
    """What computes the row sums of flat uint8 tensors; `starts`: the index of each tensor's first sum."""
    if not kernels.available() or not tensors[0].is_cuda:
        return PlainRowSums(tensors, starts)
    from holdfast.kernels.row_sums import RowSums

    return RowSums(tensors, starts)


class DeviceCopy:
    """Copies flat uint8 tensors of one device to fixed places of a slot's payload. One copy at a time.

    `starts`: where in the payload; `digest_starts`: the index of each tensor's first row sum; `rows`: of the whole digest.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        starts: Sequence[int],
        digest_starts: Sequence[int],
        rows: int,
        lane: Any = None,
    ) -> None:
        self.lane = lane or CudaLane(tensors[0].device)
        self._row_sums = row_sums_of(tensors, digest_starts)
        self._sums = torch.zeros(rows, dtype=torch.int64, device=tensors[0].device)
        self._groups, self._places = _group(tensors, starts)
        self._targets: dict[Slot, list[list[torch.Tensor]]] = {}
        self._spare, self._out_of_memory = self._sums.new_empty(0, dtype=torch.uint8), False
        self._late_groups = 0
        """the last groups, which the pass before was too short for: they are copied from duplicates"""
        self._lock = threading.Lock()
        """of what is below, the running copy: one thread queues it, the training thread releases it"""
        self._slot: Slot | None = None
        self._left = 0
        self._late: list[list[torch.Tensor]] = []
        """duplicates that are not queued yet"""
        self._typical = False
        self._marks: dict[str, Any] = {}

    def mark(self) -> Any:
        """Called by the training thread when a copy begins."""
        return self.lane.mark()

    def queue(self, slot: Slot, mark: Any) -> None:
        """Queues the copy of the tensors as they are at the mark, except for the late groups."""
        self._typical = slot in self._targets  # the first copy into a slot registers its memory
        self._targets_in(slot)
        self.lane.begin(mark)
        digest = torch.from_numpy(slot.digest[: len(self._sums)])
        with self._lock:
            self._slot, self._left, self._late, self._marks = slot, len(self._groups), [], {"begun": mark}
            self._marks["summed"] = self.lane.sum(self._row_sums, self._sums, digest)
            self._marks["read"] = self._queue(self._groups[: len(self._groups) - self._late_groups])

    def release(self) -> None:
        """The training's stream may change the tensors from here on: it waits for what still reads them. Does not wait itself."""
        with self._lock:
            if self._slot is None:
                return
            self._marks["released"] = self.lane.mark()
            if self._left:
                rest = self._groups[-self._left :]
                if self._reserve(sum(map(len, _parts(rest)))):
                    self._late = self._duplicate(rest)
                    self.lane.copy_after(self.lane.mark())
                else:
                    self._marks["read"] = self._queue(rest)
            self.lane.train_after(self._marks["read"])
            self.lane.train_after(self._marks["summed"])

    def finish(self) -> float:
        """Returns when everything is in the slot: for how many seconds the training's stream waited."""
        queued = [self._marks["read"]]
        self.lane.wait(queued[0])
        while self._left:
            with self._lock:
                if self._late:
                    self._queue([self._late.pop(0)])
                elif self._left:  # not released yet: there is time for the late groups too
                    self._marks["read"] = self._queue(self._groups[-self._left :])
                queued.append(self._marks["last"])
            self.lane.wait(queued[-IN_FLIGHT])
        for mark in (self._marks["last"], self._marks["summed"]):
            self.lane.wait(mark)
        with self._lock:
            self._slot = None
            if "released" not in self._marks:
                return 0.0
            late = self.lane.seconds_between(self._marks["released"], self._marks["read"])
            if self._typical:
                self._adapt(late, self.lane.seconds_between(self._marks["begun"], self._marks["read"]))
            return max(0.0, late or 0.0)

    def abandon(self) -> None:
        """The copy has failed."""
        with self._lock:
            self._slot = None

    def _queue(self, groups: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Queues the next groups, from these sources; a mark at their end."""
        assert self._slot is not None
        first = len(self._groups) - self._left
        targets = self._targets[self._slot][first : first + len(groups)]
        self._left -= len(groups)
        self._marks["last"] = self.lane.copy(_parts(targets), _parts(groups))
        return self._marks["last"]

    def _adapt(self, late: float | None, seconds: float | None) -> None:
        """Decides how many groups are late at the next release, from how late the last read of the tensors was (None: the
        training had not even come to the release) and how many seconds all such reads took."""
        groups = len(self._groups)
        each = (seconds or 0.0) / groups
        if late is None or late < -EARLY_GROUPS * each:
            self._late_groups = max(0, self._late_groups - 1)
        elif late > LATE_SECONDS and each:
            self._late_groups = min(groups // 2, self._late_groups + math.ceil(late / each) + 1)
        if self._late_groups and not self._reserve(sum(map(len, _parts(self._groups[-self._late_groups :])))):
            self._late_groups = 0

    def _reserve(self, nbytes: int) -> bool:
        """Whether there is memory for duplicates of this size; it is kept for later copies."""
        if nbytes <= len(self._spare):
            return True
        size = nbytes + nbytes // 4
        if self._out_of_memory or size > self.lane.spare_bytes():
            return False
        try:
            self._spare = torch.empty(size, dtype=torch.uint8, device=self._sums.device)
        except torch.OutOfMemoryError:
            self._out_of_memory = True  # not tried again: each time torch would give up its cached memory first
        return not self._out_of_memory

    def _duplicate(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The groups, copied to the spare memory by the training's stream."""
        begin = 0
        duplicates: list[list[torch.Tensor]] = []
        for group in groups:
            duplicates.append([])
            for part in group:
                duplicates[-1].append(self._spare[begin : begin + len(part)])
                begin += len(part)
        torch._foreach_copy_(_parts(duplicates), _parts(groups))
        return duplicates

    def drop_slot(self, slot: Slot) -> None:
        """Drops the references to a slot whose memory is released."""
        self._targets.pop(slot, None)

    def _targets_in(self, slot: Slot) -> list[list[torch.Tensor]]:
        """The slot's memory as tensors that the device writes to directly."""
        if slot not in self._targets:
            self.lane.register(slot)
            payload = torch.from_numpy(slot.payload)
            self._targets[slot] = [[payload[begin:end] for begin, end in places] for places in self._places]
        return self._targets[slot]


def _group(
    tensors: Sequence[torch.Tensor], starts: Sequence[int]
) -> tuple[list[list[torch.Tensor]], list[list[tuple[int, int]]]]:
    """The tensors, in parts of at most GROUP_BYTES and in groups of about that size; with it their places in the payload."""
    groups: list[list[torch.Tensor]] = []
    places: list[list[tuple[int, int]]] = []
    size = GROUP_BYTES
    for tensor, start in zip(tensors, starts, strict=True):
        for begin in range(0, len(tensor), GROUP_BYTES):
            part = tensor[begin : begin + GROUP_BYTES]
            if size + len(part) > GROUP_BYTES:
                groups.append([])
                places.append([])
                size = 0
            groups[-1].append(part)
            places[-1].append((start + begin, start + begin + len(part)))
            size += len(part)
    return groups, places


def _parts(groups: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [part for group in groups for part in group]
