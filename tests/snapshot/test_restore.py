"""Resuming at another world size and layout, with another model, and from a snapshot that is set aside; rows 24, 29."""

import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot import Snapshots
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.nan_guard import NanGuard
from holdfast.system.errors import HoldfastError
from tests.grids import mostly_slow
from tests.snapshot.harness import Fault, abandon, launch, nothing_left, run_to_the_end, wait_for

pytestmark = pytest.mark.distributed

CHANGES = [
    ("ddp", 4, "ddp", 2),
    ("ddp", 2, "ddp", 4),
    ("ddp", 4, "ddp", 3),
    ("ddp", 1, "ddp", 4),
    ("ddp", 2, "fsdp", 2),
    ("fsdp", 3, "ddp", 2),
    ("tp", 4, "ddp", 4),
]


@pytest.mark.parametrize(("layout", "world", "new_layout", "new_world"), mostly_slow(CHANGES, CHANGES[2:5:2]))
def test_memory_serves_another_world(run, oracle, layout, world, new_layout, new_world):
    run.layout, run.world = layout, world
    run.faults = [Fault("kill", rank=-1, step=6, point="committed")]
    assert not launch(run).wait(run)
    hashes = oracle(run)
    later = replace(run, layout=new_layout, world=new_world, steps=9, faults=[])
    assert run_to_the_end(later, restarts=0) == 0
    (resumed,) = later.events("resumed")
    assert resumed["source"] == "memory" and resumed["step"] >= 5
    restored = later.trace("restored")[-new_world:]
    assert {entry["hash"] for entry in restored} == {hashes[resumed["step"]]}
    assert restored[0]["seen"] == list(range(1, resumed["step"] + 1)), "the cursor comes along"
    wait_for(lambda: nothing_left(run.memory), "old and new memory to be freed")


@pytest.mark.parametrize("save_every", [0, 6])
def test_steps_that_were_lost_with_the_memory_are_counted_and_the_loss_is_named(run, check, save_every):
    """After a reboot, for example. The log of `holdfast train` shows how far the run was."""
    run.save_every = save_every
    run.faults = [
        Fault("wait_for_disk", rank=0, step=6, point="saved"),
        Fault("kill keeper", rank=0, step=8, point="forward"),
        Fault("kill", rank=-1, step=8, point="backward"),
    ]
    assert not launch(run).wait(run)
    shutil.rmtree(run.memory / f"holdfast-{os.getuid()}")
    (run.folder / "metrics.jsonl").write_bytes(b'{"iteration":7}\n{"iteration":8}\n{"itera')
    run.faults = []
    assert check(run, lost=2, sources=("disk",)) == 0
    (lost,) = [event for event in run.events("snapshot") if event["outcome"] == "lost"]
    assert lost["step"] == 8
    assert [(event["step"], event["steps_lost"]) for event in run.events("resumed")] == [(6, 2)][:save_every]


def test_a_step_that_one_rank_alone_holds_is_named(run, check):
    run.save_every = 4
    run.faults = [
        Fault("wait_for_disk", rank=0, step=4, point="saved"),
        Fault("kill keeper", rank=0, step=6, point="forward"),
        Fault("kill", rank=-1, step=6, point="backward"),
    ]
    assert not launch(run).wait(run)
    (arena,) = run.memory.rglob("rank-00001-*.arena")
    arena.unlink()
    run.faults = []
    assert check(run, lost=2, sources=("disk",)) == 0
    assert any("of ranks [0] alone" in event["reason"] for event in run.events("snapshot"))


def test_another_model_is_refused_by_name_and_memory_is_kept(run, check):
    run.faults = [Fault("kill", rank=-1, step=6, point="committed")]
    assert not launch(run).wait(run)
    wider = replace(run, width=24, faults=[])
    assert not launch(wider).wait(wider)
    refusals = [event["reason"] for event in run.events("refused")]
    assert any("0.weight" in reason and "[64, 16]" in reason and "[96, 24]" in reason for reason in refusals), refusals
    run.faults = []
    check(run)
    assert run.events("resumed")[0]["step"] >= 5


def test_a_state_that_leads_to_nan_twice_is_set_aside(run, check):
    run.save_every, run.pace = 3, 0.05
    run.faults = [
        Fault("kill", rank=-1, step=8, point="committed"),
        Fault("report_nan_and_die", rank=0, step=9, point="forward", attempts=(1, 2)),
    ]
    assert not launch(run).wait(run)
    first = wait_for(lambda: [e["step"] for e in run.events("persisted")], "a checkpoint")
    for attempt in (1, 2):
        assert not launch(run, attempt).wait(run)
    bad = [event["step"] for event in run.events("resumed")]
    assert len(bad) == 2 and min(bad) >= 7
    assert launch(run, 3).wait(run)
    resumed = run.events("resumed")[-1]
    assert resumed["source"] == "disk" and resumed["step"] < min(bad) and resumed["step"] in first
    assert [e for e in run.events("snapshot") if e["outcome"] == "set aside"]
    assert not [step for step, _ in checkpoints_in(run.folder) if min(bad) <= step < 9]


def test_a_nan_counts_once_per_resume_and_only_near_it(tmp_path):
    guard = NanGuard(tmp_path)
    guard.resumed_from(50)
    guard.report(60)
    guard.report(61)
    assert guard.suspected() is None, "one resumed run met it, however often"
    guard.resumed_from(60)
    guard.report(300)
    guard.report(500)
    assert guard.suspected() is None, "far beyond the resumed step: another matter"
    guard.resumed_from(60)
    guard.report(70)
    assert guard.suspected() == 50
    guard.resumed_from(40)
    assert guard.suspected() is None
    guard.resumed_from(None)
    guard.report(3)
    guard.report(4)
    assert guard.suspected() is None, "a fresh start has no state to suspect"


def test_a_step_that_is_set_aside_again_gets_another_name(tmp_path):
    guard = NanGuard(tmp_path)
    for _ in range(3):
        (tmp_path / "checkpoints" / "step-00000050").mkdir(parents=True)
        for _ in range(2):
            guard.resumed_from(50)
            guard.report(55)
        assert len(guard.quarantine()) == 1
        guard.resumed_from(40)
    assert len(list((tmp_path / "checkpoints").glob("set-aside-step-00000050*"))) == 3


def held_run(folder, memory, steps=(1, 2), name="one", **parts):
    """A run of one rank that was killed after these steps: what its memory holds."""
    model = torch.nn.Linear(3, 3)
    snapshots = Snapshots(name, model, folder=folder, memory=memory, **parts)
    snapshots.restore()
    for step in steps:
        snapshots.commit()
        with torch.no_grad():
            model.weight.fill_(step)
        snapshots.take(step)
    snapshots.commit()
    abandon(snapshots)
    return model


def test_the_only_state_is_used_although_it_led_to_nan_twice(tmp_path, memory, capfd):
    held_run(tmp_path, memory)
    for _ in range(2):
        again = Snapshots("one", torch.nn.Linear(3, 3), folder=tmp_path, memory=memory)
        assert again.restore() == 2
        again.report_nan()
        abandon(again)
    last = Snapshots("one", model := torch.nn.Linear(3, 3), folder=tmp_path, memory=memory)
    assert last.restore() == 2
    assert model.weight.unique().tolist() == [2.0]
    assert "no older state can be used" in capfd.readouterr().err
    last.close()


@pytest.mark.parametrize("damage", ["arena header", "truncated", "both slot headers"])
def test_damaged_memory_without_a_checkpoint_is_named_and_never_means_step_0(tmp_path, memory, capfd, damage):
    held_run(tmp_path, memory)
    (path,) = memory.rglob("rank-*.arena")
    arena = Arena(path)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with open(path, "r+b") as file:
            for position in [12] if damage == "arena header" else [8192 + 24, 8192 + arena.sizes.stride + 24]:
                file.seek(position)
                byte = file.read(1)[0]
                file.seek(position)
                file.write(bytes([byte ^ 1]))
    arena.close()
    again = Snapshots("one", torch.nn.Linear(3, 3), folder=tmp_path, memory=memory)
    with pytest.raises(HoldfastError, match="start over at step 0, remove") as refusal:
        again.restore()
    assert str(again.run_memory.path) in str(refusal.value)
    assert path.name in capfd.readouterr().err
    abandon(again)
    shutil.rmtree(again.run_memory.path)
    fresh = Snapshots("one", torch.nn.Linear(3, 3), folder=tmp_path, memory=memory)
    assert fresh.restore() == 0
    fresh.close()


def test_an_older_checkpoint_without_late_optimizer_state_serves_when_the_newest_is_damaged(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "late": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters())
    for step, parts in ((1, ("a",)), (2, ("a", "late"))):
        optimizer.zero_grad()
        sum(model[part](torch.ones(2)).sum() for part in parts).backward()
        optimizer.step()
        checkpoint.save(tmp_path / "checkpoints", step, checkpoint.State(model, optimizer))
    (shard,) = (tmp_path / "checkpoints" / "step-00000002").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    fresh = torch.optim.Adam(model.parameters())
    path, _ = checkpoint.load_newest(tmp_path, checkpoint.State(model, fresh))
    assert path.name == "step-00000001"
    assert len(fresh.state) == 2


@pytest.mark.parametrize("obstacle", ["folder", "link loop", "fifo"])
def test_what_is_no_manifest_gives_way_to_the_checkpoint_before(tmp_path, obstacle):
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        checkpoint.save(tmp_path / "checkpoints", step, checkpoint.State(model))
    manifest = tmp_path / "checkpoints" / "step-00000002" / "MANIFEST.json"
    manifest.unlink()
    if obstacle == "folder":
        manifest.mkdir()
    elif obstacle == "fifo":
        os.mkfifo(manifest)
    else:
        manifest.symlink_to(manifest)
    path, _ = checkpoint.load_newest(tmp_path, checkpoint.State(model))
    assert path.name == "step-00000001"


SETTINGS = {
    "infinite": lambda group: group.update(lr=float("inf")),
    "a list": lambda group: group.update(betas=[0.5, 0.6]),
    "a NumPy number": lambda group: group.update(lr=np.float64(0.125)),
    "nothing": lambda group: group.update(own=None),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_optimizer_settings_come_back_exactly(tmp_path, memory, kind):
    def build():
        model = torch.nn.Linear(2, 2)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = build()
    first = Snapshots("exact", model, optimizer, folder=tmp_path, memory=memory)
    first.restore()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["largest"] = -math.inf
    SETTINGS[kind](optimizer.param_groups[0])
    first.take(1)
    first.commit()
    assert first.skipped == 0
    abandon(first)
    model, fresh = build()
    second = Snapshots("exact", model, fresh, folder=tmp_path, memory=memory)
    assert second.restore() == 1
    wanted, found = ({k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (optimizer, fresh))
    assert found == wanted
    assert type(found["betas"]) is type(wanted["betas"])
    assert fresh.state[model.weight]["largest"] == -math.inf
    second.close()
