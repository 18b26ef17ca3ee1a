"""Kill -9 at random instants while a tiny process copies in a loop: what is READY is whole and of one step, and there
always is one."""

import os
import random
import signal
import time

import numpy as np
import pytest

from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.slot import EMPTY, READY
from tests.snapshot.harness import abandon, context, wait_for

TENSORS, ELEMENTS = 6, 40_000


def copy_forever(path, first_step):
    """Fills every tensor with the step and copies it, as fast as it goes, into the slot that is not the newest."""
    import torch

    from holdfast.checkpoint.layout import lay_out
    from holdfast.checkpoint.state import describe
    from holdfast.snapshot.memory.copier import Copier, Copy
    from holdfast.snapshot.memory.slot import WRITING, SlotHeader, sizes_for

    torch.set_num_threads(1)
    tensors = [torch.zeros(ELEMENTS + i) for i in range(TENSORS)]
    items = [describe(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    layout = lay_out([item.box for item in items])
    arena = Arena(path) if path.exists() else Arena.create(path, sizes_for(layout, 2), "r" * 32, "p" * 32, 0, 1, 1)
    copier = Copier(items, layout, lambda slot, step: None)
    step = first_step
    while True:
        step += 1
        for tensor in tensors:
            tensor.fill_(step)
        headers = arena.headers()[:2]
        newest = max(headers, key=lambda header: header.sequence if header.state == READY else -1)
        index = 1 - headers.index(newest) if newest.state == READY else 0
        slot = arena.slot(index)
        slot.store(SlotHeader(WRITING, step, step, 0, 0, 0, 0, 0.0))
        copy = Copy(slot, step, step, {}, {})
        copier.start(copy)
        copy.done.wait()
        assert copy.trouble is None


@pytest.mark.parametrize("kills", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_kills_leave_a_whole_snapshot_every_time(memory, kills):
    path = memory / "rank-00000-of-00001.aaaaaaaa.arena"
    chance = random.Random(1)
    step, writing = 0, 0
    for _ in range(kills):
        process = context.Process(target=copy_forever, args=(path, step))
        process.start()
        wait_for(lambda before=step: path.exists() and newest_step(path) > before, "a first snapshot")
        time.sleep(chance.random() * 0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        step, torn = check_slots(path, step)
        writing += torn
    assert writing > kills // 10, "the kills must hit copies on their way, or this shows nothing"


def newest_step(path):
    arena = Arena(path)
    steps = arena.ready_steps()
    arena.close()
    return max(steps, default=0)


def check_slots(path, before):
    """Every READY slot verifies and holds one step; the newest is younger than what was there before."""
    arena = Arena(path)
    ready, unfinished = [], 0
    for index, header in enumerate(arena.headers()[:2]):
        if header.state == READY:
            slot = arena.slot(index)
            slot.verify(header)
            layout = slot.layout(header)
            for piece, start in zip(layout.pieces, layout.starts, strict=True):
                values = slot.payload[start : start + piece.nbytes].view(np.float32)
                assert (values == header.step).all(), f"{piece.name} of step {header.step} is torn"
            ready.append(header.step)
        elif header.state != EMPTY:
            unfinished = 1
    assert ready and max(ready) > before, "no snapshot"
    arena.close()
    return max(ready), unfinished


def test_buffers_that_the_forward_pass_changes_are_held_as_they_were(tmp_path, memory):
    """BatchNorm's running statistics change while the copy is on its way."""
    import torch

    from holdfast.snapshot import Snapshots

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.large = torch.nn.Parameter(torch.zeros(20_000_000))  # so that there is a while to change something in
    snapshots = Snapshots("a", model, folder=tmp_path, memory=memory)
    snapshots.restore()
    for step in range(1, 5):
        snapshots.commit()
        held = {name: buffer.clone() for name, buffer in model.named_buffers()}
        snapshots.take(step)
        model(torch.randn(8, 4))
    snapshots.commit()
    assert snapshots.skipped == 0
    assert not torch.equal(held["1.running_mean"], model[1].running_mean)
    abandon(snapshots)
    again = Snapshots("a", model, folder=tmp_path, memory=memory)
    assert again.restore() == 4
    assert all(torch.equal(buffer, held[name]) for name, buffer in model.named_buffers())
    again.close()
