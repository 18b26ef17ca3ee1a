"""Bits that flip in memory, files that are damaged on disk; rows 17 and 18 of the matrix."""

import os
import signal

import psutil
import pytest

from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.slot import READY
from tests.snapshot.harness import Fault, keeper_process, launch, wait_for

pytestmark = pytest.mark.distributed

REGIONS = ["payload", "slot header", "table of tensors", "small state", "row sums"]


def flip(run, rank, where, age=0):
    """Flips one bit of a rank's newest (or older) snapshot; its step."""
    (path,) = run.memory.rglob(f"rank-{rank:05d}-of-*.arena")
    arena = Arena(path)
    ready = [(h.sequence, i) for i, h in enumerate(arena.headers()) if h.state == READY]
    index = sorted(ready)[-1 - age][1]
    slot = arena.slot(index)
    header = slot.header()
    target, position = {
        "payload": (slot.payload, slot.layout(header).starts[0] + 5),
        "slot header": (slot.whole, 24),
        "table of tensors": (slot.payload, 40),
        "small state": (slot.meta, 10),
        "row sums": (slot.digest.view("uint8"), 9),
    }[where]
    target[position] ^= 4
    arena.close()
    return header.step


def crash_without_keeper(run, step=6):
    """All ranks and the keeper die right after `commit`; how many snapshots a rank holds."""
    from holdfast.snapshot.memory.run_memory import RunMemory

    run.faults = [Fault("stop", rank=-1, step=step, point="committed")]
    run.pace = 0.02
    launched = launch(run)
    wait_for(lambda: run.trace("restored"), "the ranks to start")
    process = keeper_process(RunMemory.of(run.name, run.folder, run.memory))
    if run.save_every:
        wait_for(lambda: run.events("persisted"), "a checkpoint")
    os.kill(process, signal.SIGSTOP)
    wait_for(
        lambda: all(psutil.Process(rank.pid).status() == "stopped" for rank in launched.ranks), "all ranks to stand"
    )
    launched.kill()
    assert not launched.wait(run)
    os.kill(process, signal.SIGKILL)
    run.faults, run.pace = [], 0.0
    (path,) = run.memory.rglob("rank-00001-of-*.arena")
    return sum(header.state == READY for header in Arena(path).headers())


@pytest.mark.parametrize("where", REGIONS)
def test_a_flipped_bit_is_found_and_the_snapshot_before_is_used(run, check, where):
    crash_without_keeper(run)
    flipped = flip(run, 1, where)
    check(run, lost=2)
    assert run.events("resumed")[0]["step"] == flipped - 1
    if where == "payload":
        (rejected,) = [e for e in run.events("snapshot") if e["outcome"] == "rejected"]
        assert rejected["step"] == flipped and "is damaged in the 4 KiB" in rejected["reason"]


def test_memory_that_is_damaged_throughout_gives_way_to_the_disk(run, check):
    run.save_every = 4
    held = crash_without_keeper(run, step=11)
    for age in range(held):
        flip(run, 1, "payload", age)
    run.save_every = 0
    check(run, lost=8, sources=("disk",))
    assert run.events("resumed")[0]["step"] in (4, 8)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "swap"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(run, check, damage):
    run.save_every = 3
    run.pace = 0.05
    run.steps = 9
    check(run)
    checkpoints = run.folder / "checkpoints"
    written = sorted(int(p.name[5:]) for p in checkpoints.glob("step-*"))
    assert len(written) > 1 and written[-1] == 9, "a save may wait for the one before it, the last one is always there"
    one, other = sorted((checkpoints / "step-00000009").glob("*.safetensors"))
    if damage == "flip":
        content = bytearray(one.read_bytes())
        content[-3] ^= 1
        one.write_bytes(content)
    elif damage == "truncate":
        one.write_bytes(one.read_bytes()[:-1])
    elif damage == "delete":
        other.unlink()
    else:
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
    run.steps = 12
    check(run, lost=99, sources=("disk",))
    assert run.events("resumed")[0]["step"] == written[-2]
    assert any("step-00000009" in e["reason"] for e in run.events("snapshot"))
