"""The keeper: killed, asked, out of room, slow; rows 5-7, 19, 27 and 28 of the matrix."""

import contextlib
import os
import signal
import threading
import time

import pytest

from holdfast.checkpoint import load, open_checkpoint
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.keeper import service
from holdfast.snapshot.keeper.client import start_keeper
from holdfast.snapshot.keeper.save_queue import SaveQueue, node_arenas
from holdfast.snapshot.keeper.service import Keeper
from holdfast.snapshot.keeper.status import keeper_status
from holdfast.snapshot.memory.ready_slot import common_steps, find_ready
from holdfast.snapshot.memory.run_memory import RunMemory, keeper_alive, read_json, write_json
from holdfast.snapshot.ranks.status_page import FINISHED, RankStatus, status_page_name
from holdfast.snapshot.ranks.stop_signals import StopSignals
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from tests.disks import small_disk
from tests.snapshot.harness import Fault, build, keeper_process, launch, nothing_left, state_hash, wait_for

pytestmark = pytest.mark.distributed


def place_of(run):
    return RunMemory.of(run.name, run.folder, run.memory)


def steps_on_disk(run):
    return [step for step, _ in checkpoints_in(run.folder)]


def wait_until_written(run, step):
    wait_for(lambda: step in steps_on_disk(run), f"step {step} on disk: {run.events()}")


def hash_on_disk(run, step):
    """What a single process, with the same model, loads from the checkpoint of a step."""
    from dataclasses import replace

    from holdfast.checkpoint import State

    model, optimizer = build(replace(run, world=1, layout="ddp"))
    load(run.folder / "checkpoints" / f"step-{step:08d}", State(model, optimizer))
    return state_hash(model, optimizer)


def begin_writing(run, launched):
    """Waits for the keeper to be in the middle of writing a checkpoint, and stops it there; its process."""
    process = keeper_process(place_of(run))
    folder = run.folder / "checkpoints"
    wait_for(lambda: list(folder.glob(".step-*.tmp")) if folder.exists() else None, "the keeper to write")
    os.kill(process, signal.SIGSTOP)
    return process


def test_saves_come_from_memory_and_hold_what_the_step_held(run, check, oracle):
    run.save_every, run.steps = 5, 12
    run.options = {"keep_last": 2}
    run.pace = 0.02
    check(run)
    assert steps_on_disk(run) == [10, run.steps]  # the last step is saved at the end
    for step in (10, run.steps):
        assert hash_on_disk(run, step) == oracle(run)[step]
    assert {e["reason"] for e in run.events("persisted")} == {"save"}
    with open_checkpoint(run.folder) as checkpoint:
        assert checkpoint.manifest.source == "memory" and len(checkpoint.manifest.files) == 2
        assert checkpoint.shared["extra"]["seen"] == list(range(1, run.steps + 1))


def test_all_ranks_killed_while_the_keeper_writes(run, check, oracle):
    run.width, run.save_every, run.pace, run.steps = 256, 4, 0.05, 40
    launched = launch(run)
    process = begin_writing(run, launched)
    launched.kill()
    launched.wait(run)
    os.kill(process, signal.SIGCONT)
    wait_until_written(run, 4)
    assert hash_on_disk(run, 4) == oracle(run)[4]
    run.steps = 12
    check(run)


def test_the_keeper_killed_and_then_a_rank(run, check):
    run.faults = [Fault("kill keeper", rank=0, step=3), Fault("kill", rank=1, step=6, point="forward")]
    assert check(run) == 1


def test_a_killed_keeper_is_replaced_while_training_goes_on(run, check):
    run.pace, run.steps = 0.3, 14
    launched = launch(run)
    wait_for(lambda: run.trace("restored"), "the ranks to train")
    first = keeper_process(place_of(run))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: keeper_process(place_of(run)) != first, "a new keeper")
    assert launched.wait(run)
    wait_for(lambda: nothing_left(run.memory), "the memory to be freed")


def test_the_keeper_killed_while_it_writes(run, check, oracle):
    run.width, run.save_every, run.pace, run.steps = 256, 4, 0.2, 16
    launched = launch(run)
    process = begin_writing(run, launched)
    os.kill(process, signal.SIGKILL)
    assert launched.wait(run)
    assert 16 in steps_on_disk(run)
    assert hash_on_disk(run, 16) == oracle(run)[16]
    assert not list((run.folder / "checkpoints").glob(".*")), "what the dead keeper left is gone"


@pytest.fixture
def disk(run):
    """The run folder on a disk of its own, which can be filled to the last byte."""
    with small_disk(run.folder, "4m") as folder:
        yield folder


def fill(disk):
    """Takes every byte that is left; the file to remove when it is enough."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


def test_no_room_on_disk_keeps_training_and_memory_and_is_tried_again(disk, run, oracle):
    run.width, run.save_every, run.pace, run.steps = 64, 4, 0.1, 30
    launched = launch(run)
    wait_for(lambda: newest_held(run) >= 1, "the first snapshot")
    filler = fill(disk)
    wait_for(lambda: newest_held(run) >= 10, "training and snapshots to go on although saves find no room")
    assert steps_on_disk(run) == []
    assert not list((run.folder / "checkpoints").glob(".*")), "the half-written folder is gone"
    filler.unlink()
    wait_for(lambda: steps_on_disk(run), "the save to be written after all")
    assert launched.wait(run)
    refusals = run.events("refused")
    assert refusals and "no room left on the disk" in refusals[0]["reason"], (
        "logged as soon as there was room for a line"
    )
    assert {end["hash"] for end in run.trace("ended")} == {oracle(run)[30]}


def test_a_run_comes_back_from_memory_although_the_disk_is_full(disk, run):
    run.pace = 0.05
    launched = launch(run)
    wait_for(lambda: newest_held(run) >= 3, "a few snapshots")
    filler = fill(disk)
    launched.kill()
    assert not launched.wait(run)
    again = launch(run, attempt=1)
    wait_for(lambda: newest_held(run) >= 8, "training to go on from memory")
    filler.unlink()
    assert again.wait(run)
    (resumed,) = run.events("resumed")
    assert resumed["source"] == "memory" and resumed["steps_lost"] <= 1


def newest_held(run):
    return max((h.step for h in headers(run, 0)), default=0) if list(run.memory.rglob("rank-00000-of-*.arena")) else 0


def headers(run, rank):
    from holdfast.snapshot.memory.arena import Arena

    (path,) = run.memory.rglob(f"rank-{rank:05d}-of-*.arena")
    arena = Arena(path)
    found = arena.headers()
    arena.close()
    return found


def test_a_slow_disk_does_not_stop_snapshots_nor_tear_what_is_written(run, oracle):
    run.width, run.save_every, run.pace, run.steps = 256, 5, 0.02, 40
    launched = launch(run)
    process = begin_writing(run, launched)
    wait_for(lambda: max(h.step for h in headers(run, 1)) >= 12, "snapshots to go on in other slots")
    assert sum(h.state == 2 for h in headers(run, 1)) >= 2, "a third slot serves while one is written"
    os.kill(process, signal.SIGCONT)
    wait_until_written(run, 5)
    assert launched.wait(run)
    assert hash_on_disk(run, 5) == oracle(run)[5]
    assert {end["hash"] for end in run.trace("ended")} == {oracle(run)[40]}


def test_persist_and_stop_by_a_file_in_the_run_folder(run, check, oracle):
    for trigger in ("persist", "error.txt"):
        run.steps, run.pace = 5000, 0.01
        launched = launch(run)
        wait_for(
            lambda: (
                (run.trace("restored") and place_of(run).pages())
                and all(page["step"] > 3 for page in place_of(run).pages().values())
            ),
            "some steps",
        )
        (run.folder / trigger).touch()
        assert launched.wait(run)
        stops = {end["step"] for end in run.trace("ended")[-2:]}
        assert len(stops) == 1, "all ranks stop after the same step"
        wait_for(lambda: nothing_left(run.memory), "the memory to be freed")
        assert steps_on_disk(run)[-1] == stops.pop()
        assert not (run.folder / trigger).exists()


def test_the_memory_of_a_living_run_is_not_taken(run):
    run.steps, run.pace = 4000, 0.02
    first = launch(run)
    wait_for(lambda: len(place_of(run).pages()) == 2, "the first run")
    second = launch(run, attempt=7)
    assert not second.wait(run)
    refused = run.events("refused")
    assert refused and "holdfast persist" in refused[0]["reason"]
    assert [page["restarts"] for page in place_of(run).pages().values()] == [0, 0]
    first.kill()
    first.wait(run)


def test_runs_of_one_name_in_two_folders_do_not_meet(run, check, tmp_path):
    from dataclasses import replace

    other = replace(run, folder=tmp_path / "other", steps=200, pace=0.05)
    second = launch(other)
    wait_for(lambda: other.trace("restored"), "the other run")
    run.faults = [Fault("kill", rank=1, step=5)]
    from tests.snapshot.harness import run_to_the_end

    assert run_to_the_end(run) == 1
    assert run.events("resumed")[0]["step"] in (4, 5)
    assert place_of(other).path.exists(), "the other run's memory is untouched"
    second.kill()
    second.wait(other)


def test_stale_memory_is_freed_and_never_loaded(run, check):
    stale = RunMemory.of("old", run.folder, run.memory)
    stale.make()
    record = read_json(stale.path / "run.json")
    write_json(stale.path / "run.json", {**record, "boot": "another boot"})
    foreign = run.memory / f"holdfast-{os.getuid()}" / "other-user"
    foreign.mkdir()
    (foreign / "precious").write_text("not ours")
    launched = launch(run)
    assert launched.wait(run)
    assert not stale.path.exists()
    assert (foreign / "precious").exists(), "what Holdfast did not make is not removed"
    assert run.trace("restored")[0]["step"] == 0


def test_an_arena_of_another_run_is_never_loaded(run, check, tmp_path):
    import shutil
    from dataclasses import replace

    other = replace(run, folder=tmp_path / "other", faults=[Fault("kill", rank=0, step=6)])
    launch(other).wait(other)
    place_of(run).make()
    for path in place_of(other).arenas():
        shutil.copy(path, place_of(run).path)
    launched = launch(run)
    assert launched.wait(run)
    assert {e["step"] for e in run.trace("restored")} == {0}


def test_a_keeper_is_small(run):
    run.steps, run.pace = 300, 0.02
    launched = launch(run)
    process = keeper_process(place_of(run))
    wait_for(lambda: place_of(run).pages() and place_of(run).pages()[0]["step"] > 5, "some steps")
    import psutil

    assert psutil.Process(process).memory_full_info().uss < 100 << 20
    launched.kill()
    launched.wait(run)


def test_what_cannot_be_kept_is_refused_by_name(run, tmp_path):
    import torch

    from holdfast.checkpoint.json_state import encode
    from holdfast.snapshot import Snapshots

    with pytest.raises(HoldfastError, match="cursor"):
        Snapshots("x", torch.nn.Linear(2, 2), extra={"cursor": 3}, folder=tmp_path, memory=run.memory)
    with pytest.raises(HoldfastError, match=r"extra.when is a object"):
        encode({"when": object()})


def test_a_keeper_whose_trainer_never_came_leaves_and_takes_the_folder_with_it(run):
    run_memory = place_of(run)
    run_memory.make()
    write_json(run_memory.path / "settings.json", {"linger_seconds": 0.5})
    start_keeper(run_memory)
    wait_for(lambda: not run_memory.path.exists(), "the folder to go")
    wait_for(lambda: not keeper_alive(run_memory), "the keeper to go")


def test_a_keeper_that_does_not_know_its_ranks_leaves_a_living_one_its_memory(run):
    run_memory = place_of(run)
    run_memory.make()
    write_json(run_memory.path / "settings.json", {"linger_seconds": 0.2})  # nothing says which ranks are on this node
    page = RankStatus(run_memory.path / status_page_name(0))
    page.claim()
    start_keeper(run_memory)
    time.sleep(1.0)
    assert run_memory.path.exists() and keeper_alive(run_memory)
    page["status"] = FINISHED
    wait_for(lambda: not run_memory.path.exists(), "the folder to go")


def test_memory_that_was_claimed_again_is_not_freed(run, monkeypatch):
    """By a process that died before the keeper looked again: its newest step may not be on disk."""
    run_memory = place_of(run)
    run_memory.make()
    page = RankStatus(run_memory.path / status_page_name(0))
    page.claim()
    page["status"] = FINISHED
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    keeper = Keeper(run_memory, keeper_status(run_memory))
    before = keeper._claims()
    page.claim()
    page["status"] = 0
    assert not keeper._free(before) and run_memory.path.exists()
    assert keeper._free(keeper._claims()) and not run_memory.path.exists()


def test_a_save_requested_right_before_the_ranks_end_is_done_before_the_memory_is_freed(run, monkeypatch):
    """The request and FINISHED come after the keeper has read the requests of a round."""
    run.world, run.steps, run.pace = 1, 400, 0.01
    launched, run_memory = launch(run), place_of(run)
    process = keeper_process(run_memory)
    wait_for(lambda: run_memory.pages()[0]["ready"] >= 3, "snapshots")
    os.kill(process, signal.SIGSTOP)
    launched.kill()
    launched.wait(run)
    os.kill(process, signal.SIGKILL)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    keeper = Keeper(run_memory, keeper_status(run_memory))
    with node_arenas(run_memory) as arenas:
        step = common_steps(arenas)[0]
        token = find_ready(arenas[0], step).small["token"]
    write_json(
        run_memory.requests / "1-save.json", {"kind": "save", "step": step, "token": token, "retention": [1, None]}
    )
    pages = run_memory.pages()
    pages[0]["status"] = FINISHED
    assert not keeper._has_ended(pages), "the request is still to be done"
    keeper._saves.work()
    assert keeper._has_ended(pages) and nothing_left(run.memory)
    assert [event["reason"] for event in run.events("persisted")] == ["save"]


def test_the_memory_is_freed_after_the_answer_to_persist_was_read(run, monkeypatch):
    run_memory = place_of(run)
    run_memory.make()
    monkeypatch.setattr(service, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    keeper = Keeper(run_memory, keeper_status(run_memory))
    answer = run_memory.requests / "1-persist.answer.json"
    answer.touch()
    freeing = threading.Thread(target=keeper._free, args=({},))
    freeing.start()
    time.sleep(0.3)
    assert answer.exists()
    answer.unlink()
    freeing.join(60)
    assert not freeing.is_alive() and not run_memory.path.exists()


def test_a_stop_reaches_the_ranks_although_the_memory_is_full(run):
    with small_disk(run.memory / "small", "64k") as memory:
        run_memory = RunMemory.of(run.name, run.folder, memory)
        run_memory.make()
        fill(memory)
        SaveQueue(run_memory, Journal(run.folder / "events.jsonl"), print)._stop_run("persist --stop")
        signals = StopSignals(run_memory.path, listen=False)
        assert signals.stop_requested() and signals.reason == "asked"
