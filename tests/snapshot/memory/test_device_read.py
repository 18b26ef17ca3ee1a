"""What is read to a device is what the slot holds, and every flipped bit is noticed there.

The device is the CPU here: reading and comparing are the same code, only page-locked buffers and streams are CUDA's own.
"""

import pytest
import torch

from holdfast.checkpoint.layout import lay_out
from holdfast.checkpoint.state import describe
from holdfast.snapshot import Snapshots, restore_memory
from holdfast.snapshot.memory import device_read
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.copier import Copier, Copy
from holdfast.snapshot.memory.slot import READY, DamagedError, sizes_for
from tests.snapshot.harness import abandon

CPU = torch.device("cpu")


@pytest.fixture
def arena(memory, monkeypatch):
    monkeypatch.setattr(device_read, "CHUNK_BYTES", 8192)
    tensors = [torch.randn(5000), torch.randn(33, 7).bfloat16(), torch.tensor(3.0), torch.zeros(0)]
    items = [describe(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    layout = lay_out([item.box for item in items])
    arena = Arena.create(memory / "a.arena", sizes_for(layout, 2), "r" * 32, "p" * 32, 0, 1, 1)
    copier = Copier(items, layout, lambda slot, step: None)
    copy = Copy(arena.slot(1), 1, 7, {}, {})
    copier.start(copy)
    copier.close()
    assert copy.trouble is None
    yield arena
    arena.close()


def test_the_payload_arrives_whole(arena):
    header = arena.headers()[1]
    payload = device_read.read_verified(arena, 1, header, CPU)
    slot = arena.slot(1)
    assert payload.numpy().tobytes() == slot.payload[: slot.layout(header).size].tobytes()


@pytest.mark.parametrize("tensor", ["t0", "t1", "t2"])
def test_a_flipped_bit_of_a_tensor_is_noticed(arena, tensor):
    header, slot = arena.headers()[1], arena.slot(1)
    layout = slot.layout(header)
    ((piece, start),) = (at for at in zip(layout.pieces, layout.starts, strict=True) if at[0].name == tensor)
    slot.payload[start + piece.nbytes - 1] ^= 16
    with pytest.raises(DamagedError, match=f"{tensor} of step 7 is damaged in the 4 KiB"):
        device_read.read_verified(arena, 1, header, CPU)


@pytest.mark.parametrize("region", ["meta", "digest", "table"])
def test_a_flipped_bit_of_the_tables_is_noticed(arena, region):
    header, slot = arena.headers()[1], arena.slot(1)
    {"meta": slot.meta, "digest": slot.digest.view("uint8"), "table": slot.payload}[region][9] ^= 1
    with pytest.raises(DamagedError, match="match"):
        device_read.read_verified(arena, 1, header, CPU)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_restore_by_way_of_the_device(tmp_path, memory, monkeypatch, damaged):
    """The newest step that verifies is loaded, with optimizer state that the new process does not have yet."""
    monkeypatch.setattr(restore_memory, "staging_device", lambda state: CPU)
    monkeypatch.setattr(restore_memory, "fits", lambda nbytes, device: True)
    torch.manual_seed(0)

    def build():
        model = torch.nn.Linear(300, 40)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, Snapshots("a", model, optimizer, folder=tmp_path, memory=memory)

    model, optimizer, snapshots = build()
    snapshots.restore()
    states = {}
    for step in (1, 2, 3):
        model(torch.randn(8, 300)).sum().backward()
        snapshots.commit()
        optimizer.step()
        optimizer.zero_grad()
        states[step] = [t.clone() for t in (model.weight, model.bias, optimizer.state[model.weight]["exp_avg_sq"])]
        snapshots.take(step)
    snapshots.commit()
    abandon(snapshots)
    if damaged:
        (path,) = memory.rglob("*.arena")
        arena = Arena(path)
        index = next(i for i, h in enumerate(arena.headers()) if h.state == READY and h.step == 3)
        arena.slot(index).payload[arena.slot(index).layout(arena.headers()[index]).starts[1] + 77] ^= 2
        arena.close()
    model, optimizer, snapshots = build()
    step = snapshots.restore()
    assert step == (2 if damaged else 3)
    found = (model.weight, model.bias, optimizer.state[model.weight]["exp_avg_sq"])
    assert all(torch.equal(one, other) for one, other in zip(found, states[step], strict=True))
    snapshots.close()
