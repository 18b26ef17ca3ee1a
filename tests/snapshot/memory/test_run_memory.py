"""The memory of a run: one start at a time, no other user, full and truncated files, no wall clock."""

import contextlib
import multiprocessing
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint.layout import lay_out
from holdfast.checkpoint.state import describe
from holdfast.snapshot import Snapshots
from holdfast.snapshot.keeper.client import start_keeper
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.copier import Copier, Copy
from holdfast.snapshot.memory.run_memory import (
    RunMemory,
    keeper_alive,
    lock_keeper,
    remove_stale,
    run_memories,
    user_folder,
)
from holdfast.snapshot.memory.slot import WRITING, DamagedError, SlotHeader, sizes_for
from holdfast.snapshot.ranks.status_page import RankStatus, status_page_name
from holdfast.snapshot.report import arena_facts
from holdfast.system.errors import HoldfastError
from tests.disks import small_disk
from tests.snapshot.harness import Run, abandon, keeper_process, launch, wait_for


def held_arena(folder: Path, elements: int = 5000) -> Arena:
    """An arena whose slot 0 holds one tensor."""
    tensor = torch.arange(elements, dtype=torch.float32)
    item = describe("t", tensor)
    layout = lay_out([item.box])
    arena = Arena.create(
        folder / "rank-00000-of-00001.aaaaaaaa.arena", sizes_for(layout, 2), "r" * 32, "p" * 32, 0, 1, 1
    )
    copier = Copier([item], layout, lambda slot, step: None)
    slot = arena.slot(0)
    slot.store(SlotHeader(WRITING, 1, 1, 0, 0, 0, 0, 0.0))
    copy = Copy(slot, 1, 1, {}, {})
    copier.start(copy)
    copy.done.wait()
    copier.close()
    return arena


def test_of_simultaneous_starts_exactly_one_trains(tmp_path, memory):
    for attempt in range(4):
        run = Run(tmp_path / f"run{attempt}", memory, world=1, steps=400, pace=0.01, name=f"twice{attempt}")
        starts = [launch(run), launch(run)]
        ranks = [start.ranks[0] for start in starts]
        try:
            wait_for(lambda ranks=ranks: any(not rank.is_alive() for rank in ranks), "one start to be refused")
            wait_for(lambda run=run: run.trace("restored"), "the other one to train")
            assert sum(rank.is_alive() for rank in ranks) == 1
            assert len(run.trace("restored")) == 1
        finally:
            for start in starts:
                start.kill()
            for rank in ranks:
                rank.join()


def test_a_run_folder_shared_by_two_hosts_is_trained_by_one(tmp_path, memory):
    """Each host has memory of its own: only the shared folder shows it."""
    hosts = [memory / "host0", memory / "host1"]
    for host in hosts:
        host.mkdir()
    first = Snapshots("shared", torch.nn.Linear(2, 2), folder=tmp_path, memory=hosts[0])
    with pytest.raises(HoldfastError, match="is in use: process"):
        Snapshots("shared", torch.nn.Linear(2, 2), folder=tmp_path, memory=hosts[1])
    first.close()
    second = Snapshots("shared", torch.nn.Linear(2, 2), folder=tmp_path, memory=hosts[1])
    second.close()


def test_a_start_during_the_keepers_clean_up_keeps_its_memory(tmp_path, memory):
    """The keeper of a run that ended frees the memory only if no new start has claimed it."""
    run_memory = RunMemory.of("again", tmp_path, memory)
    with run_memory.locked():
        run_memory.make()
        page = RankStatus(run_memory.path / status_page_name(0))
        page.claim()
        page["status"] = 2
    from holdfast.snapshot.keeper.service import Keeper
    from holdfast.snapshot.keeper.status import keeper_status

    keeper = Keeper(run_memory, keeper_status(run_memory))
    before = keeper._claims()
    page.claim()
    assert not keeper._free(before)
    assert page.path.exists()
    page["status"] = 2
    assert keeper._free(keeper._claims())
    assert not run_memory.path.exists()


def test_a_relative_memory_folder_serves_the_keeper_which_has_another_working_directory(tmp_path, memory, monkeypatch):
    monkeypatch.chdir(memory.parent)
    run_memory = RunMemory.of("relative", tmp_path, memory.name)
    run_memory.make()
    start_keeper(run_memory)
    assert keeper_alive(run_memory)


def _query_forever(run_memory):
    while True:
        keeper_alive(run_memory)


def test_a_query_of_the_keeper_lock_never_keeps_a_keeper_from_starting(tmp_path, memory):
    run_memory = RunMemory.of("queried", tmp_path, memory)
    run_memory.make()
    os.close(lock_keeper(run_memory))
    watchers = [
        multiprocessing.get_context("fork").Process(target=_query_forever, args=(run_memory,), daemon=True)
        for _ in range(2)
    ]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(3000):
            descriptor = lock_keeper(run_memory)
            assert descriptor is not None
            os.close(descriptor)
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.join()


def test_memory_of_a_run_that_died_a_moment_ago_is_not_freed_whatever_its_files_times_are(tmp_path, memory):
    run_memory = RunMemory.of("dead", tmp_path, memory)
    run_memory.make()
    RankStatus(run_memory.path / status_page_name(0)).claim()
    page = RankStatus(run_memory.path / status_page_name(0))
    page["process"], page["started"] = 1 << 22, 5  # a process that is no more
    for path in [*run_memory.path.rglob("*"), run_memory.path]:
        os.utime(path, (0, 0))
    other = RunMemory.of("other", tmp_path, memory)
    assert remove_stale(memory, other) == []
    page["heartbeat"] = time.monotonic_ns() - 25 * 3600 * 10**9
    if page["heartbeat"] > 0:  # the machine is up for longer than a day
        assert remove_stale(memory, other) == ["dead"]


def test_a_clock_that_goes_back_does_not_bring_back_an_older_state(tmp_path, memory, monkeypatch):
    """A changed layout gets new memory; which of two is newer must not depend on the clock."""

    def train(snapshots, model, steps):
        for step in steps:
            snapshots.commit()
            with torch.no_grad():
                model.weight.fill_(step)
            snapshots.take(step)
        snapshots.commit()
        abandon(snapshots)

    model = torch.nn.Linear(3, 3)
    first = Snapshots("clock", model, folder=tmp_path, memory=memory)
    first.restore()
    train(first, model, range(1, 6))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    monkeypatch.setattr(time, "time_ns", lambda: int((now - 3600) * 1e9))
    grown = torch.nn.Linear(3, 3)
    grown.register_buffer("more", torch.zeros(5))
    second = Snapshots("clock", grown, folder=tmp_path / "elsewhere", memory=memory)
    second.restore()
    second.close()
    model.register_buffer("late", torch.zeros(2))  # from here on with other memory
    third = Snapshots("clock", model, folder=tmp_path, memory=memory)
    with pytest.raises(HoldfastError):
        third.restore()  # its state lacks the new buffer, and is not passed over in silence
    del model._buffers["late"]
    abandon(third)
    fourth = Snapshots("clock", model, folder=tmp_path, memory=memory)
    assert fourth.restore() == 5
    model.register_buffer("late", torch.zeros(2))
    train(fourth, model, range(6, 10))
    generations = sorted(Arena(path).generation for path in memory.rglob("rank-*.arena"))
    assert generations == sorted(set(generations))
    fifth = Snapshots("clock", model, folder=tmp_path, memory=memory)
    assert fifth.restore() == 9
    fifth.close()


# Other users


def test_a_folder_that_another_user_made_is_refused(tmp_path, memory):
    if os.getuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    planted = memory / f"holdfast-{os.getuid()}"
    planted.mkdir(0o777)
    os.chown(planted, 65534, 65534)
    with pytest.raises(HoldfastError, match="not a folder of this user"):
        Snapshots("mine", torch.nn.Linear(2, 2), folder=tmp_path, memory=memory)
    assert not list(planted.iterdir())


def test_links_in_place_of_files_are_not_followed(tmp_path, memory):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 4096)
    run_memory = RunMemory.of("linked", tmp_path / "run", memory)
    run_memory.make()
    (run_memory.path / status_page_name(0)).symlink_to(secret)
    with pytest.raises((HoldfastError, OSError)):
        Snapshots("linked", torch.nn.Linear(2, 2), folder=tmp_path / "run", memory=memory)
    assert secret.read_bytes() == b"x" * 4096
    target = tmp_path / "theirs"
    target.mkdir()
    (memory / "elsewhere").mkdir()
    (memory / "elsewhere" / f"holdfast-{os.getuid()}").symlink_to(target)
    with pytest.raises(HoldfastError, match="not a folder of this user"):
        Snapshots("linked", torch.nn.Linear(2, 2), folder=tmp_path / "run", memory=memory / "elsewhere")


def test_the_keeper_imports_nothing_from_the_folder_it_keeps_and_files_are_private(tmp_path, memory):
    run_memory = RunMemory.of("private", tmp_path / "run", memory)
    run_memory.make()
    marker = tmp_path / "executed"
    for name in ("orjson", "numpy", "xxhash", "sitecustomize"):
        (run_memory.path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(3)\n")
    before = os.umask(0)
    try:
        snapshots = Snapshots("private", torch.nn.Linear(2, 2), folder=tmp_path / "run", memory=memory)
        snapshots.restore()
        for step in (1, 2):
            snapshots.commit()
            snapshots.take(step)
        snapshots.save(2)
        process = keeper_process(run_memory)
        assert os.readlink(f"/proc/{process}/cwd") == "/"
        open_to_others = [
            path
            for path in [run_memory.path.parent, *run_memory.path.parent.rglob("*")]
            if path.suffix != ".py" and path.exists() and stat.S_IMODE(path.lstat().st_mode) & 0o077
        ]
        snapshots.close()
    finally:
        os.umask(before)
    assert not marker.exists()
    assert not open_to_others


# Full and damaged memory


def test_verifying_memory_that_changes_meanwhile_reports_damage_and_never_breaks(memory):
    arena = held_arena(memory, elements=3_000_000)
    slot, header = arena.slot(0), arena.headers()[0]
    good = slot.digest[:2000].copy()
    done = threading.Event()

    def change():
        while not done.is_set():
            slot.digest[:2000] = good + 1
            slot.digest[:2000] = good

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            with contextlib.suppress(DamagedError):
                slot._verify_span(header, slot.layout(header).pieces[0], 4096, slot.digest, 0)
    finally:
        done.set()
        thread.join()


def test_a_truncated_arena_is_damaged_and_does_not_end_the_process(memory):
    arena = held_arena(memory)
    path = arena.path
    arena.close()
    os.truncate(path, 3 * 4096)
    with pytest.raises(DamagedError, match="truncated"):
        Arena(path)


FILL = """
    import os, sys, torch
    from pathlib import Path
    from holdfast.snapshot import Snapshots
    from holdfast.snapshot.ranks.status_page import RankStatus

    memory, run = Path(sys.argv[1]), sys.argv[2]
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"grows": (lambda: "x" * size, lambda saved: None)}
    size = 10
    snapshots = Snapshots("full", model, optimizer, extra, run, memory=memory)
    snapshots.restore()
    for step in range(1, 30):
        model(torch.ones(64)).sum().backward()
        snapshots.commit()
        optimizer.step()
        snapshots.take(step)
        if step == 5:  # a neighbour takes every page that is left
            file = os.open(memory / "neighbour", os.O_CREAT | os.O_WRONLY)
            try:
                while True:
                    os.write(file, b"x" * 4096)
            except OSError:
                os.close(file)
        if step in (8, 12):
            snapshots.save(step)
        if step == 15:
            size = 1 << 20  # more than there is room for
        if step == 25:
            (memory / "neighbour").unlink()
    snapshots.commit()
    print(f"trained {step} skipped {snapshots.skipped > 0}", flush=True)
    snapshots.close()
"""


def test_training_goes_on_when_a_neighbour_fills_the_memory_file_system(tmp_path):
    script = tmp_path / "fill.py"
    script.write_text(textwrap.dedent(FILL))
    with small_disk(tmp_path / "memory", "4m") as memory:
        done = subprocess.run(
            [sys.executable, script, memory, tmp_path / "run"], capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 1, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "trained 29" in done.stdout
    assert "step 29 is not on disk: it could not be copied to" in done.stderr, "no snapshot of it fits"


def test_headers_of_slots_that_take_no_memory_are_read_without_taking_any(memory):
    arena = held_arena(memory)
    before = os.stat(arena.path).st_blocks
    for _ in range(3):
        arena.headers()
    assert os.stat(arena.path).st_blocks == before
    assert np.count_nonzero([header.state for header in arena.headers()]) == 1


@pytest.mark.parametrize("content", ["{}", "[]", '"text"', '{"name": 5, "folder": "/tmp"}', '{"name": "damaged"}', "{"])
def test_a_damaged_record_does_not_hide_the_other_runs(tmp_path, content):
    for name, record in {"damaged": content, "whole": '{"name": "whole", "folder": "/tmp/whole"}'}.items():
        entry = user_folder(tmp_path) / name
        entry.mkdir(parents=True)
        (entry / "run.json").write_text(record)
    assert [run_memory.name for run_memory in run_memories(tmp_path)] == ["whole"]


def test_memory_that_is_freed_while_it_is_read_has_no_pages(tmp_path, memory, monkeypatch):
    run_memory = RunMemory.of("freed", tmp_path, memory)
    run_memory.make()
    RankStatus(run_memory.path / status_page_name(0))
    found = list(run_memory.path.iterdir())
    run_memory.free()
    monkeypatch.setattr("holdfast.snapshot.memory.run_memory._entries", lambda _: found)
    assert run_memory.pages() == {} and run_memory.memory_bytes() == 0


def test_a_report_allocates_no_memory_of_slots_that_are_not_in_use(tmp_path):
    """On a full file system the load from a mapped page would end the process."""
    arena = held_arena(tmp_path)
    before = arena.path.stat().st_blocks
    (slot,) = arena_facts(arena, verify=True)["slots"]
    assert slot["verified"] and arena.path.stat().st_blocks == before and list(arena._slots) == [0]
    arena.close()
