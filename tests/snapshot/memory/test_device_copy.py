"""A copy from a device whose tensors change before it is complete still holds them as they were.

The lane runs on the CPU: copies are done when something waits for them, and the rest of the code is what runs with CUDA.
"""

import threading

import pytest
import torch

from holdfast.checkpoint.layout import lay_out
from holdfast.checkpoint.state import describe
from holdfast.snapshot.memory import device_copy
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.copier import Copier, Copy
from holdfast.snapshot.memory.slot import EMPTY, READY, WRITING, SlotHeader, sizes_for
from tests.snapshot.harness import wait_for

ELEMENTS, TENSORS = 3000, 5


class DeferredLane:
    """A copy is done when the training's stream, or with a permit the copying thread, waits for its mark: as late as possible."""

    def __init__(self, spare: int = 1 << 20, late: float | None = 0.0) -> None:
        self.permit, self.spare, self.late = threading.Event(), spare, late
        self.queued, self.lock, self.duplicated = [], threading.Lock(), 0

    def mark(self):
        return 0

    def begin(self, mark):
        pass

    def register(self, slot):
        pass

    def sum(self, row_sums, sums, digest):
        row_sums.into(sums)
        digest.copy_(sums)
        return 0

    def copy(self, targets, sources):
        self.queued.append((targets, sources))
        return len(self.queued)

    def run(self, mark):
        with self.lock:
            for number, (targets, sources) in enumerate(self.queued[:mark]):
                torch._foreach_copy_(targets, sources)
                self.queued[number] = ([torch.zeros(1)], [torch.zeros(1)])

    def wait(self, mark):
        assert self.permit.wait(60)
        self.run(mark)

    def train_after(self, mark):
        self.run(mark)

    def copy_after(self, mark):
        self.duplicated += 1

    def seconds_between(self, first, second):
        return self.late

    def spare_bytes(self):
        return self.spare


@pytest.fixture
def copying(memory, monkeypatch):
    """(tensors, arena, lane, copier). The last two of the copy's six groups are late."""
    monkeypatch.setattr(device_copy, "GROUP_BYTES", 4 * ELEMENTS)
    tensors = [torch.full((ELEMENTS,), 7.0) for _ in range(TENSORS)]
    tensors.append(torch.full((100, 20), 7.0).t())  # its memory is not in order
    items = [describe(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    layout = lay_out([item.box for item in items])
    arena = Arena.create(memory / "a.arena", sizes_for(layout, 2), "r" * 32, "p" * 32, 0, 1, 1)
    lane = DeferredLane()
    copier = Copier(items, layout, lambda slot, step: None, lane)
    copier.device_copy._late_groups = 2
    yield tensors, arena, lane, copier
    lane.permit.set()
    copier.close()
    arena.close()


def begin(arena, copier, step):
    arena.slot(0).store(SlotHeader(WRITING, step, step, 0, 0, 0, 0, 0.0))
    copy = Copy(arena.slot(0), step, step, {}, {})
    copier.start(copy)
    return copy


def assert_holds(arena, value):
    header = arena.headers()[0]
    assert header.state == READY
    slot = arena.slot(0)
    slot.verify(header)
    layout = slot.layout(header)
    for piece, start in zip(layout.pieces, layout.starts, strict=True):
        content = torch.from_numpy(slot.payload[start : start + piece.nbytes]).view(torch.float32)
        assert (content == value).all(), piece.name


def fill(tensors, value):
    for tensor in tensors:
        tensor.fill_(value)


@pytest.mark.parametrize("spare", [1 << 20, 0])
def test_tensors_that_change_after_a_release_are_held_as_they_were(copying, spare):
    """From duplicates of the late groups, or without memory for them after the training has waited."""
    tensors, arena, lane, copier = copying
    lane.spare = spare
    copy = begin(arena, copier, 7)
    copier.release(copy)
    assert copy.released and not copy.done.is_set()
    assert lane.duplicated == bool(spare)
    fill(tensors, 8.0)
    lane.permit.set()
    assert copy.done.wait(60) and copy.trouble is None
    assert_holds(arena, 7.0)
    second = begin(arena, copier, 8)  # the next copy reads the tensors again
    assert second.done.wait(60)
    assert_holds(arena, 8.0)


def test_tensors_that_change_without_a_release_are_noticed(copying):
    tensors, arena, lane, copier = copying
    copy = begin(arena, copier, 7)
    tensors[0].fill_(8.0)
    copier.release(copy)
    lane.permit.set()
    assert copy.done.wait(60) and not copy.released
    assert "changed during the copy" in copy.trouble
    assert arena.headers()[0].state == EMPTY


def test_a_copy_that_is_never_released_completes(copying):
    _, arena, lane, copier = copying
    lane.permit.set()
    copy = begin(arena, copier, 7)
    assert copy.done.wait(60) and not copy.released and copy.trouble is None
    assert_holds(arena, 7.0)


def test_a_late_copy_duplicates_more_and_an_early_one_less(copying):
    tensors, arena, lane, copier = copying
    found = []
    for step, lane.late in enumerate((0.0, 0.1, 0.1, -9.0, None, None, None), start=1):
        lane.permit.clear()
        copy = begin(arena, copier, step)
        copier.release(copy)
        lane.permit.set()
        assert copy.done.wait(60) and copy.trouble is None
        assert copy.late_seconds == max(0.0, lane.late or 0.0)
        found.append(copier.device_copy._late_groups)
        fill(tensors, float(step))
    # the first copy into a slot does not count, and at most half of the six groups are late
    assert found == [2, 3, 3, 2, 1, 0, 0]


def test_an_optimizer_step_may_follow_a_released_copy(tmp_path, memory, monkeypatch):
    """`commit` does not wait for the copy; the next `take` does."""
    from holdfast.checkpoint import open_checkpoint
    from holdfast.snapshot import Snapshots
    from holdfast.snapshot.memory import slot_allocator

    monkeypatch.setattr(device_copy, "GROUP_BYTES", 4 * ELEMENTS)
    lane = DeferredLane()
    monkeypatch.setattr(slot_allocator, "Copier", lambda *arguments: Copier(*arguments, lane))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(TENSORS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    snapshots = Snapshots("a", model, optimizer, folder=tmp_path, memory=memory)
    snapshots.restore()
    for step in range(1, 4):
        for parameter in model.parameters():
            parameter.grad = -torch.ones(ELEMENTS)
        snapshots.commit()
        optimizer.step()
        lane.permit.set()
        snapshots.take(step)
        wait_for(lambda before=step: snapshots._copy is None or snapshots._copy.queued.is_set(), "the queued copy")
        lane.permit.clear()
    lane.permit.set()
    snapshots.close()
    assert snapshots.skipped == 0
    assert (open_checkpoint(tmp_path).tensor("model.0") == 3.0).all()
