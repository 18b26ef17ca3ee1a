"""Faults of the keeper itself: killed while it writes, stopped, unable to save, to start or to find its address."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from holdfast.snapshot.keeper import client as keeper_client
from holdfast.snapshot.keeper.client import start_keeper
from holdfast.snapshot.keeper.failed_saves import record_failed_save
from holdfast.snapshot.keeper.rank_watch import HeartbeatAge
from holdfast.snapshot.memory.arena import KEEPER, SLOTS, Arena
from holdfast.snapshot.memory.run_memory import keeper_alive, read_json, remove_stale, write_json
from holdfast.snapshot.ranks.status_page import FINISHED, RankStatus, status_page_name
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import read_journal
from holdfast.system.processes import start_time
from tests.snapshot.harness import Fault, keeper_process, launch, nothing_left, wait_for
from tests.snapshot.keeper.test_service import (
    begin_writing,
    disk,  # noqa: F401
    fill,
    hash_on_disk,
    newest_held,
    place_of,
    steps_on_disk,
    wait_until_written,
)

pytestmark = pytest.mark.distributed
SHORT_WAITS = Fault("shorten_waits", rank=-1, step=0, point="restoring")


def test_a_keeper_killed_during_a_persist_leaves_no_pin_behind(run, oracle):
    run.world, run.width, run.save_every, run.pace, run.steps = 1, 256, 24, 0.1, 24
    launched = launch(run)
    wait_for(lambda: newest_held(run) >= 2, "some steps")
    write_json(place_of(run).requests / "0-persist.json", {"kind": "persist"})
    process = begin_writing(run, launched)
    (path,) = place_of(run).arenas()
    arena = Arena(path)
    assert any(arena.pinned(index, KEEPER) for index in range(SLOTS))
    os.kill(process, signal.SIGKILL)
    assert launched.wait(run)
    arena.close()
    assert 24 in steps_on_disk(run) and hash_on_disk(run, 24) == oracle(run)[24]
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")


@pytest.mark.parametrize("pace", [0.0, 0.3])
def test_a_stopped_keeper_is_replaced_and_the_run_saved(run, oracle, pace):
    """With pace 0 the run ends while the keeper is stopped."""
    run.world, run.save_every, run.pace, run.steps = 1, 0, pace, 30
    run.faults = [SHORT_WAITS, Fault("stop_keeper", step=5, point="taken")]
    launched = launch(run)
    stopped = keeper_process(place_of(run))
    assert launched.wait(run)
    assert not start_time(stopped), "the stopped keeper was killed"
    assert steps_on_disk(run)[-1] == 30 and hash_on_disk(run, 30) == oracle(run)[30]
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")


def test_a_keeper_killed_while_it_writes_the_last_step_is_replaced(run, oracle):
    run.world, run.width, run.steps = 1, 512, 3
    launched = launch(run)
    os.kill(begin_writing(run, launched), signal.SIGKILL)
    assert launched.wait(run)
    assert steps_on_disk(run) == [3] and hash_on_disk(run, 3) == oracle(run)[3]


def test_a_run_whose_last_step_cannot_be_saved_fails_and_names_the_memory(disk, run, oracle):  # noqa: F811
    run.width, run.pace, run.steps, run.faults = 64, 0.05, 12, [SHORT_WAITS]
    launched = launch(run)
    wait_for(lambda: newest_held(run) >= 1, "the first snapshot")
    filler = fill(disk)
    assert not launched.wait(run)
    assert [rank.exitcode for rank in launched.ranks] == [1, 1], "all ranks, by themselves"
    run_memory = place_of(run)
    for status in run_memory.pages().values():
        assert "step 12 is not on disk: no room left on the disk" in status.error_text
        assert f"still in memory, in {run_memory.path}" in status.error_text
        assert f"holdfast persist {run_memory.folder} --snapshot-dir {run.memory}" in status.error_text
    filler.unlink()
    wait_until_written(run, 12)
    assert hash_on_disk(run, 12) == oracle(run)[12]
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")


def test_retention_protects_what_the_run_resumed_from(run):
    """A save that a busy machine cannot copy in time is made one step later, so the steps are read and not assumed."""
    run.world, run.save_every, run.steps, run.pace = 1, 2, 8, 0.2
    assert launch(run).wait(run)
    saved = steps_on_disk(run)
    assert len(saved) == 4 and saved[-1] == 8
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")
    for step in saved[2:]:
        shard = run.folder / "checkpoints" / f"step-{step:08d}" / "shard-00000-of-00001.safetensors"
        os.truncate(shard, shard.stat().st_size - 1)
    run.save_every, run.steps, run.options = 6, 12, {"keep_last": 2}
    assert launch(run).wait(run)
    assert run.trace("restored")[-1]["step"] == saved[1]
    kept = steps_on_disk(run)
    assert (kept[0], kept[-1], len(kept)) == (saved[1], 12, 3), kept


def test_the_same_command_at_once_after_a_stop_resumes_from_memory_and_keeps_it(run):
    run.world, run.width, run.steps, run.pace = 1, 512, 4000, 0.05
    launched = launch(run)
    wait_for(lambda: newest_held(run) >= 3, "some steps")
    os.kill(launched.ranks[0].pid, signal.SIGTERM)
    process = begin_writing(run, launched)
    assert launched.wait(run)
    ended = run.trace("ended")[-1]["step"]
    again = launch(run, attempt=1)
    wait_for(lambda: newest_held(run) >= ended + 3, "the second start to train")
    os.kill(process, signal.SIGCONT)
    wait_until_written(run, ended)
    reached = newest_held(run)
    wait_for(lambda: newest_held(run) >= reached + 8, "the second start to go on after the keeper wrote")
    assert run.trace("restored")[-1]["step"] == ended and run.events("resumed")[-1]["source"] == "memory"
    assert place_of(run).path.exists() and place_of(run).pages()[0].owner_alive()
    again.kill()
    again.wait(run)


@pytest.fixture
def read_only(run):
    """Makes the checkpoints folder a file system that can be switched to read-only and back."""
    folder = run.folder / "checkpoints"
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield lambda mode: subprocess.run(["mount", "-o", f"remount,bind,{mode}", folder], check=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_file_system_that_turns_read_only_is_reported_and_used_again(run, read_only):
    run.world, run.save_every, run.pace, run.steps = 1, 3, 0.2, 60
    read_only("ro")
    launched = launch(run)
    report = place_of(run).path / "failed_save.json"
    found = wait_for(lambda: read_json(report), "the failed save to be reported to the trainer")
    assert "Read-only file system" in found["reason"] and found["step"] == 3
    read_only("rw")
    wait_until_written(run, 3)
    assert launched.wait(run)
    assert steps_on_disk(run)[-1] == 60


def test_a_keeper_starts_although_the_run_folder_cannot_be_written(run):
    run_memory = place_of(run)
    run_memory.make()
    run.folder.parent.mkdir(exist_ok=True)
    run.folder.write_text("not a folder")  # events.jsonl cannot be opened
    write_json(run_memory.path / "settings.json", {"here": [0], "linger_seconds": 600})
    start_keeper(run_memory)
    process = keeper_process(run_memory)
    time.sleep(1.0)
    assert keeper_alive(run_memory) and keeper_process(run_memory) == process


def test_what_ranks_killed_while_they_start_leave_in_memory_is_removed(run):
    run_memory = place_of(run)
    run.folder.mkdir()
    run_memory.make()
    write_json(run_memory.path / "settings.json", {"here": [0]})
    dead, alive = subprocess.Popen(["true"]), os.getpid()
    dead.wait()
    names = [
        ".rank-00000-of-00001.01234567.arena.0123456789abcdef-{}-890-89abcdef.tmp",
        "pulled-{}-0123456789abcdef.arena",
    ]
    for name in names:
        for process in (dead.pid, alive):
            (run_memory.path / name.format(process)).touch()
    freed = run_memory.path.with_name(".earlier-run.freed")
    freed.mkdir()
    start_keeper(run_memory)
    wait_for(
        lambda: not any((run_memory.path / name.format(dead.pid)).exists() for name in names), "the files to go", 20
    )
    assert all((run_memory.path / name.format(alive)).exists() for name in names)
    remove_stale(run.memory, run_memory)
    assert not freed.exists()


def test_a_keeper_that_cannot_start_is_reported_with_its_log(run):
    run_memory = place_of(run)
    run_memory.make()
    (run_memory.path / "run.json").write_text("damaged")
    with pytest.raises(HoldfastError, match="does not start: .*is not the memory of a run"):
        start_keeper(run_memory)


def test_a_keeper_that_ends_again_and_again_is_reported_once_and_given_up(run, monkeypatch, capfd):
    monkeypatch.setattr(keeper_client, "CHECK_SECONDS", 0.5)
    run_memory = place_of(run)
    run_memory.make()
    (run_memory.path / "run.json").write_text("damaged")
    client = keeper_client.KeeperClient(run_memory)

    def failed():
        client.check()
        log = run_memory.path / "keeper.log"
        wait_for(lambda: log.stat().st_size, "the keeper to report why it ends")
        return client.has_failed()

    wait_for(failed, "the client to give up")
    (warning,) = capfd.readouterr().err.splitlines()
    assert "soon after its start" in warning and "is not the memory of a run" in warning
    with pytest.raises(HoldfastError, match=r"step 7 is not on disk: .*holdfast persist"):
        client.wait_for_save(7, "token", time.monotonic() + 60)


def test_an_earlier_failure_does_not_count_against_the_last_save(run, monkeypatch):
    monkeypatch.setattr(keeper_client, "FAILED_SAVE_SECONDS", 0.5)
    monkeypatch.setattr(keeper_client, "CHECK_SECONDS", 0.0)
    run.folder.mkdir()
    run_memory = place_of(run)
    run_memory.make()
    write_json(run_memory.path / "settings.json", {"here": [0]})
    start_keeper(run_memory)
    client = keeper_client.KeeperClient(run_memory)
    time.sleep(0.5)
    record_failed_save(run_memory, 3, "no room", None)
    client.check()
    time.sleep(0.6)
    assert client.has_failed()
    client.expect_save()
    assert not client.has_failed()


def test_an_interpreter_that_cannot_start_the_keeper_does_not_end_the_training(run, monkeypatch, capfd):
    run.folder.mkdir()
    run_memory = place_of(run)
    run_memory.make()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    keeper_client.KeeperClient(run_memory).check()
    assert "cannot be replaced: /bin/false could not start the keeper" in capfd.readouterr().err
    with pytest.raises(HoldfastError, match="could not start the keeper"):
        start_keeper(run_memory)


START_WITH_A_HOST_NAME = """
import socket, sys
from pathlib import Path
socket.sethostname("name.invalid")
from holdfast.snapshot.memory.run_memory import RunMemory, write_json
from holdfast.snapshot.keeper.client import start_keeper
place = RunMemory.of(sys.argv[1], sys.argv[2], sys.argv[3])
write_json(place.path / "settings.json", {"nodes": [place.node, "another-host:/memory"], "here": [0], "mode": "peer"})
start_keeper(place)
"""


def test_a_host_name_without_an_address_does_not_end_the_keeper(run):
    run_memory = place_of(run)
    run.folder.mkdir()
    run_memory.make()
    status = RankStatus(run_memory.path / status_page_name(0))
    status.claim()
    command = ["unshare", "--uts", sys.executable, "-c", START_WITH_A_HOST_NAME, run.name, run.folder, run.memory]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip("a host name of its own needs root")
    assert done.returncode == 0, done.stderr
    process = keeper_process(run_memory)
    time.sleep(1.5)
    assert keeper_alive(run_memory) and keeper_process(run_memory) == process, (
        run_memory.path / "keeper.log"
    ).read_text()
    os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def watched_process(run, **settings):
    """A process that owns the status page of rank 0, and a keeper that watches it."""
    run_memory = place_of(run)
    run.folder.mkdir()
    run_memory.make()
    write_json(run_memory.path / "settings.json", {"here": [0], "kill_hung": True, **settings})
    child = subprocess.Popen(["sleep", "600"])
    status = RankStatus(run_memory.path / status_page_name(0))
    status.claim()
    status["process"], status["started"] = child.pid, start_time(child.pid)
    try:
        yield run_memory, status, child
    finally:
        status["status"] = FINISHED
        child.kill()
        child.wait()


@pytest.mark.parametrize("beats", [True, False])
def test_a_rank_is_killed_only_if_the_same_heartbeat_is_seen_again(run, beats):
    with watched_process(run, hang_seconds=1.0) as (run_memory, status, child):
        status["heartbeat"] = 0
        start_keeper(run_memory)
        begin = time.monotonic()
        while time.monotonic() < begin + 4:
            if beats and time.monotonic() > begin + 2:
                status["heartbeat"] = (
                    time.monotonic_ns() - 100 * 10**9
                )  # as after a time in which the machine stood still
            time.sleep(0.05)
        assert child.poll() is None
        assert not list(read_journal(run.folder / "events.jsonl"))
        status["heartbeat"] = 1
        wait_for(lambda: child.poll() is not None, "the hung process to be killed", 30)
    assert next(read_journal(run.folder / "events.jsonl"))["kind"] == "hung"


def test_time_in_which_the_watcher_itself_stood_still_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr("holdfast.snapshot.keeper.rank_watch.time.monotonic", lambda: now)
    age = HeartbeatAge()
    assert not age.exceeds(10, 7)
    now += 1000
    assert not age.exceeds(10, 7), "the whole machine may have been suspended"
    now += 4
    assert not age.exceeds(10, 7)
    now += 4
    assert age.exceeds(10, 7)
