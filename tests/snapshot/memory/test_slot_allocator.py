"""Refusals and choices of a rank's own memory; row 20 of the matrix."""

import copy
import os
import re

import pytest
import torch
import torch.distributed as dist

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot import Snapshots
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.slot import NOTHING, READY, SlotHeader
from holdfast.snapshot.memory.slot_allocator import slots_to_use
from holdfast.system.errors import HoldfastError
from tests.gloo import spawn_ranks
from tests.snapshot.harness import abandon, memory_folder, wait_for


def test_too_little_memory_is_refused_with_the_size_to_give(tmp_path, memory):
    free = os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize
    model = torch.nn.Module()
    # takes no memory itself, and more than there is to be held
    model.weight = torch.nn.Parameter(torch.zeros(1).expand(free // 4))
    snapshots = Snapshots("big", model, folder=tmp_path, memory=memory)
    assert snapshots.restore() == 0
    with pytest.raises(HoldfastError, match="too small") as refusal:
        snapshots.take(1)
    (size,) = re.findall(r"--shm-size=(\d+)m", str(refusal.value))
    assert int(size) << 20 > 3 * free
    assert not list(memory.rglob("*.arena"))
    assert "refused" in (tmp_path / "events.jsonl").read_text()
    with pytest.raises(HoldfastError, match="step 1 is not on disk: .* too small"):
        snapshots.close()


def test_an_optimizer_state_that_cannot_be_held_is_refused_by_name(tmp_path, memory):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())  # keeps lists of earlier directions
    snapshots = Snapshots("a", model, optimizer, folder=tmp_path, memory=memory)
    snapshots.restore()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(HoldfastError, match=r"keeps a list as al of weight"):
        snapshots.take(1)
    with pytest.raises(HoldfastError, match="step 1 is not on disk: the optimizer keeps a list"):
        snapshots.close()


def load_all(optimizer):
    """As from a file: new tensors, in new dictionaries. (Its own state_dict would come back with the same tensors.)"""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_one(optimizer):
    parameter = next(iter(optimizer.state))
    optimizer.state[parameter] = copy.deepcopy(optimizer.state[parameter])


@pytest.mark.parametrize("replace", [load_all, load_one])
def test_a_replaced_optimizer_state_is_noticed(tmp_path, memory, replace):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def train(snapshots, steps):
        for step in range(1, steps + 1):
            model(torch.ones(3)).sum().backward()
            snapshots.commit()
            optimizer.step()
            if step == 2:
                replace(optimizer)
            snapshots.take(step)
        snapshots.commit()

    first = Snapshots("a", model, optimizer, folder=tmp_path, memory=memory)
    first.restore()
    train(first, 5)
    wanted = [state[key].clone() for state in optimizer.state.values() for key in sorted(state)]
    abandon(first)
    fresh = torch.optim.Adam(model.parameters())
    second = Snapshots("a", model, fresh, folder=tmp_path, memory=memory)
    assert second.restore() == 5
    found = [state[key] for state in fresh.state.values() for key in sorted(state)]
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    second.close()


def test_a_replaced_buffer_is_noticed(tmp_path, memory):
    """A running mean that is not changed in place but replaced by assignment."""
    model = torch.nn.Linear(3, 3)
    model.register_buffer("mean", torch.zeros(5))
    model.register_buffer("cache", torch.zeros(5), persistent=False)
    first = Snapshots("a", model, folder=tmp_path, memory=memory)
    first.restore()
    for step in range(1, 5):
        first.commit()
        model.mean = 0.5 * model.mean + step
        model.cache = model.cache + 1
        first.take(step)
    first.commit()
    wanted = model.mean.clone()
    abandon(first)
    model.mean = torch.zeros(5)
    second = Snapshots("a", model, folder=tmp_path, memory=memory)
    assert second.restore() == 4
    assert torch.equal(model.mean, wanted)
    second.close()


def test_a_step_that_is_taken_again_does_not_stop_the_snapshots_that_follow(tmp_path, memory):
    """A save of a step that the run did not resume from is not waited for: `close` would wait longer than a test may take."""
    model = torch.nn.Linear(3, 3)

    def take(snapshots, *steps):
        for step in steps:
            snapshots.commit()
            with torch.no_grad():
                model.weight.fill_(step)
            snapshots.take(step)
        snapshots.commit()

    first = Snapshots("a", model, folder=tmp_path, memory=memory)
    first.restore()
    take(first, 1, 2, 2, 2, 3, 4)
    abandon(first)
    second = Snapshots("a", model, folder=tmp_path, memory=memory)
    assert second.restore() == 4
    # the step that it resumed from, and a save of it at once
    second.save(4)
    take(second, 4, 4, 5, 6)
    assert (first.skipped, second.skipped) == (0, 0)
    abandon(second)
    with torch.no_grad():
        model.weight.fill_(-1)
    third = Snapshots("a", model, folder=tmp_path, memory=memory)
    assert third.restore() == 6
    assert model.weight.unique().tolist() == [6.0]
    third.close()


def test_a_save_of_the_step_that_was_resumed_from_does_not_block_later_saves(tmp_path, memory):
    """That step is then in two slots: the slot that the save pins is the one that the keeper writes and unpins."""
    model = torch.nn.Linear(3, 3)
    first = Snapshots("a", model, folder=tmp_path, memory=memory)
    first.restore()
    first.take(1)
    first.commit()
    abandon(first)
    second = Snapshots("a", model, folder=tmp_path, memory=memory)
    assert second.restore() == 1
    second.save(1)
    wait_for(lambda: [step for step, _ in checkpoints_in(tmp_path)] == [1], "step 1 on disk")
    wait_for(lambda: not list(second.run_memory.requests.iterdir()), "the keeper to be done")
    assert not second.allocator.pinned()
    second.close()


def test_a_small_state_that_grows_gets_room_and_nothing_held_is_lost(tmp_path, memory):
    history: list[float] = []
    model = torch.nn.Linear(3, 3)
    parts = {"history": (lambda: history, history.extend)}

    def snapshots():
        return Snapshots("a", model, extra=parts, folder=tmp_path, memory=memory)

    first = snapshots()
    first.restore()
    for step in range(1, 13):
        first.commit()
        history.extend([0.5] * 10_000)
        first.take(step)
        (path,) = memory.rglob("*.arena")
        held = [header.step for header in Arena(path).headers() if header.state == READY]
        assert step == 1 or max(held) >= step - 2
    first.commit()
    assert first.skipped in (1, 2), "one for each time that it outgrew its room, which is four times as large then"
    abandon(first)
    history.clear()
    second = snapshots()
    assert second.restore() == 12
    assert len(history) == 120_000
    second.close()


def _grow_small_state(folder, memory):
    """A rank whose small state grows faster than the other's, so that they outgrow their room at different steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    history: list[float] = []
    model = torch.nn.Linear(3, 3)
    snapshots = Snapshots(
        "a", model, extra={"history": (lambda: history, history.extend)}, folder=folder, memory=memory
    )
    assert snapshots.restore() == 0
    for step in range(1, 13):
        history.extend([0.5] * 10_000 * (rank + 1))
        dist.barrier()
        snapshots.commit()
        snapshots.take(step)
    snapshots.save(12)
    snapshots.close()
    dist.destroy_process_group()
    return snapshots.skipped


@pytest.mark.distributed
def test_ranks_whose_small_states_grow_apart_do_not_wait_for_each_other(tmp_path, memory):
    skipped = spawn_ranks(2, _grow_small_state, tmp_path, memory, timeout=60)
    assert all(0 < count < 3 for count in skipped), skipped
    assert [step for step, _ in checkpoints_in(tmp_path)] == [12]


def test_a_run_that_restores_in_the_same_process_holds_the_repeated_steps(tmp_path, memory):
    model = torch.nn.Linear(3, 3)
    snapshots = Snapshots("a", model, folder=tmp_path, memory=memory)
    snapshots.restore()

    def go(steps, value):
        for step in steps:
            snapshots.commit()
            with torch.no_grad():
                model.weight.fill_(value + step)
            snapshots.take(step)

    go(range(1, 5), 0.0)
    assert snapshots.restore() == 4, "the copy that was on its way is whole first"
    assert model.weight.unique().tolist() == [4.0]
    go([4, 5, 6], 100.0)
    snapshots.commit()
    with torch.no_grad():
        model.weight.fill_(-1)
    assert snapshots.restore() == 6
    assert model.weight.unique().tolist() == [106.0]
    snapshots.close()
    assert snapshots.skipped == 0


def header(step):
    return SlotHeader(READY, step, step, 0, 0, 0, 0, 0.0) if step else NOTHING


@pytest.mark.parametrize(
    ("steps", "pinned", "committed", "wanted"),
    [
        ((0, 0, 0), (0, 0, 0), None, [0, 1]),
        ((4, 5, 0), (0, 0, 0), 5, [0]),
        ((4, 5, 0), (0, 0, 0), 4, [1]),
        ((4, 5, 0), (1, 0, 0), 5, [2]),
        ((4, 5, 6), (1, 0, 0), 6, [1]),
        ((4, 5, 6), (1, 1, 1), 6, []),
    ],
)
def test_the_newest_common_step_and_pinned_slots_are_never_overwritten(steps, pinned, committed, wanted):
    assert slots_to_use([header(step) for step in steps], [bool(pin) for pin in pinned], committed) == wanted


def test_memory_folders_of_tests_are_removed():
    with memory_folder() as path:
        (path / "x").touch()
    assert not path.exists()
