"""Ranks of one run: status words that are never torn, the order of calls, ranks that drift apart, tensors that change on one."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot import Snapshots
from holdfast.snapshot.ranks.status_page import RankStatus, status_page_name
from holdfast.system.errors import HoldfastError
from tests.gloo import spawn_ranks
from tests.snapshot.harness import abandon, wait_for

HIGH, LOW = -1, 0x0102030405060708


def _store_forever(path):
    page = RankStatus(path)
    while True:
        page["heartbeat"] = HIGH
        page["heartbeat"] = LOW


def test_a_status_word_is_read_as_it_was_stored_never_in_part(memory):
    """Two million loads beside another process's stores: a store that clears first, or goes byte by byte, shows."""
    path = memory / status_page_name(0)
    page = RankStatus(path)
    page["heartbeat"] = HIGH
    writer = multiprocessing.get_context("fork").Process(target=_store_forever, args=(path,), daemon=True)
    writer.start()
    try:
        both, deadline = 0, time.monotonic() + 60
        while both < 40 and time.monotonic() < deadline:
            seen = {page["heartbeat"] for _ in range(50_000)}
            assert seen <= {HIGH, LOW}, f"values that were never stored: {seen - {HIGH, LOW}}"
            both += len(seen) == 2
        assert both, "loads and stores must meet, or this shows nothing"
    finally:
        writer.kill()
        writer.join()


def _loop(snapshots, optimizer, model, commit):
    for step in (1, 2, 3):
        model(torch.ones(2, 8)).sum().backward()
        if commit:
            snapshots.commit()
        optimizer.step()
        snapshots.take(step)


@pytest.mark.parametrize("kind", ["fused", "foreach", "for-loop", "sgd"])
def test_a_step_without_commit_raises_for_every_optimizer(tmp_path, memory, kind):
    model = torch.nn.Linear(8, 8)
    made = {
        "fused": lambda p: torch.optim.AdamW(p, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    }[kind](model.parameters())
    snapshots = Snapshots("order", model, made, folder=tmp_path, memory=memory)
    snapshots.restore()
    with pytest.raises(HoldfastError, match=r"snapshots\.commit\(\) after backward\(\) and before optimizer\.step\(\)"):
        _loop(snapshots, made, model, commit=False)
    snapshots.commit()
    _loop(snapshots, made, model, commit=True)
    snapshots.close()


def test_the_optimizer_inside_a_wrapper_is_watched_too(tmp_path, memory):
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(8, 8)
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    snapshots = Snapshots("order", model, optimizer, folder=tmp_path, memory=memory)
    snapshots.restore()
    with pytest.raises(HoldfastError, match="commit"):
        _loop(snapshots, optimizer, model, commit=False)
    snapshots.close()


def _drift(folder, memory, steps):
    """Local SGD without any exchange: rank 1 is slow at first, rank 0 later. Each checks at every step what both hold."""
    from holdfast.snapshot.ranks import rank_group as rank_group

    rank_group.EXCHANGE_SECONDS = 0.2
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshots("drift", model, optimizer, folder=folder, memory=memory)
    snapshots.restore()
    without = []
    for step in range(1, steps + 1):
        slow = rank == (1 if step < steps // 2 else 0)
        time.sleep(0.02 if slow else 0.001)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        snapshots.commit()
        optimizer.step()
        snapshots.take(step)
        if step > 2:
            held = [RankStatus(snapshots.run_memory.path / status_page_name(other)).held() for other in (0, 1)]
            if not held[0] & held[1]:
                without.append((step, held))
    dist.barrier()
    snapshots.close()
    return without


@pytest.mark.distributed
def test_ranks_that_drift_apart_always_hold_a_common_step(tmp_path, memory):
    # Two status pages are not read at one instant: only what is missing several times is missing.
    for without in spawn_ranks(2, _drift, tmp_path, memory, 120):
        assert len(without) < 3, without


def _crash_apart(folder, memory):
    """Rank 0 runs 40 steps ahead of rank 1, then both die."""
    from holdfast.snapshot.ranks import rank_group as rank_group

    rank_group.EXCHANGE_SECONDS = 0.2
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.zero_()
    snapshots = Snapshots("drift", model, folder=folder, memory=memory)
    first = snapshots.restore()
    if first:
        return first, model.weight.unique().tolist()
    for step in range(1, 60 if rank == 0 else 20):
        snapshots.commit()
        with torch.no_grad():
            model.weight.fill_(step)
        snapshots.take(step)
        time.sleep(0.0 if rank == 0 else 0.01)
    snapshots.commit()
    abandon(snapshots)
    return None


@pytest.mark.distributed
def test_a_crash_of_ranks_that_are_far_apart_resumes_from_a_step_that_both_held(tmp_path, memory):
    spawn_ranks(2, _crash_apart, tmp_path, memory)
    resumed = spawn_ranks(2, _crash_apart, tmp_path, memory)
    assert resumed[0] == resumed[1]
    step, values = resumed[0]
    assert step >= 1 and values == [float(step)]


def _state_on_one_rank(folder, memory):
    """From step 3 on, rank 1 alone has state for a second parameter; rank 1 has a buffer of another size from step 6 on."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.ModuleDict({"all": torch.nn.Linear(4, 4), f"own_{rank}": torch.nn.Linear(4, 4)})
    model.register_buffer(f"buffer_{rank}", torch.zeros(3))
    optimizer = torch.optim.Adam(model.parameters())
    snapshots = Snapshots("apart", model, optimizer, folder=folder, memory=memory)
    snapshots.restore()
    for step in range(1, 13):
        optimizer.zero_grad()
        loss = model["all"](torch.ones(4)).sum()
        if rank == 1 and step >= 3:
            loss = loss + model["own_1"](torch.ones(4)).sum()
        loss.backward()
        for parameter in model["all"].parameters():
            dist.all_reduce(parameter.grad)
        snapshots.commit()
        optimizer.step()
        if rank == 1 and step == 6:
            model.buffer_1 = torch.zeros(7)
        snapshots.take(step)
    snapshots.save(12)
    snapshots.close()
    dist.destroy_process_group()
    return snapshots.skipped


@pytest.mark.distributed
def test_tensors_that_change_on_one_rank_alone_do_not_stop_the_others(tmp_path, memory):
    skipped = spawn_ranks(2, _state_on_one_rank, tmp_path, memory, timeout=100)
    assert max(skipped) <= 6
    assert [step for step, _ in checkpoints_in(tmp_path)] == [12]


LOOP = """
    import sys, time, torch
    from holdfast.snapshot import Snapshots

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshots("plain", model=model, optimizer=optimizer, folder=sys.argv[1], memory=sys.argv[2])
    step = snapshots.restore()
    while step < 100_000:
        model(torch.ones(8)).sum().backward()
        snapshots.commit()
        optimizer.step()
        step += 1
        snapshots.take(step)
        time.sleep(0.005)
        if step == 3:
            print("training", flush=True)
    snapshots.close()
"""


def test_sigterm_ends_a_loop_that_never_asks_and_its_last_step_reaches_the_disk(tmp_path, memory):
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP))
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, script, run, memory], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "training\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        wait_for(lambda: checkpoints_in(run), "the keeper to write the last step")
    finally:
        process.kill()
        process.wait()
