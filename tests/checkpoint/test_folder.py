"""The folder of checkpoints: what is removed, what never is, and what a reader sees while a step is replaced."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.checkpoint import newest, save
from holdfast.checkpoint.folder import (
    checkpoints_in,
    new_temporary,
    publish_step,
    remove_dead_temporaries,
    remove_earlier_starts,
    shared_temporary,
)
from holdfast.checkpoint.retention import retain
from tests.checkpoint.layouts import build
from tests.checkpoint.test_writing import flip


def steps_in(folder):
    return [step for step, _ in checkpoints_in(folder)]


def damage(folder, step):
    flip(folder / f"step-{step:08d}" / "shard-00000-of-00001.safetensors")


def test_retention_never_keeps_damaged_checkpoints_instead_of_sound_ones(tmp_path):
    state = build("single")
    for step in (10, 20, 30, 40):
        save(tmp_path, step, state)
    damage(tmp_path, 30)
    damage(tmp_path, 40)
    for step in (24, 28):
        save(tmp_path, step, state)
        retain(tmp_path, 2, None, protect=[step, 20], written=[step])
    assert steps_in(tmp_path) == [20, 24, 28], "what was resumed from, and the newest two that verify"


def test_nothing_is_removed_before_enough_sound_checkpoints_exist(tmp_path):
    state = build("single")
    for step in (10, 20, 30):
        save(tmp_path, step, state)
    damage(tmp_path, 20)
    damage(tmp_path, 30)
    save(tmp_path, 24, state, keep_last=3)
    assert steps_in(tmp_path) == [10, 20, 24, 30]
    save(tmp_path, 28, state, keep_last=3)
    assert steps_in(tmp_path) == [10, 24, 28]


def watch(path, ready, over, gaps):
    ready.set()
    while not over.is_set():
        if not os.path.exists(path):
            gaps.value += 1


@pytest.fixture
def memory():
    """A folder whose fsync takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_step_that_is_written_again_is_there_at_every_instant(memory):
    context = multiprocessing.get_context("fork")
    ready, over, gaps = context.Event(), context.Event(), context.Value("i", 0)
    final = memory / "step-00000005"
    final.mkdir()
    reader = context.Process(target=watch, args=(final, ready, over, gaps))
    reader.start()
    ready.wait(20)
    for number in range(1000):
        temporary = new_temporary(memory, 5)
        temporary.mkdir()
        (temporary / "number").write_text(str(number))
        publish_step(temporary, final)
    over.set()
    reader.join(20)
    assert gaps.value == 0
    assert (final / "number").read_text() == "999"
    assert sorted(entry.name for entry in memory.iterdir()) == ["latest", "step-00000005"]


NEW_TEMPORARY = (
    "import sys; from pathlib import Path; from holdfast.checkpoint.folder import new_temporary\n"
    "new_temporary(Path(sys.argv[1]), 2).mkdir(); print('made', flush=True); sys.stdin.read()"
)


def writer(folder, *prefix):
    """A process that has just made its temporary folder, and waits."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", NEW_TEMPORARY, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdout.readline() != "made\n":
        pytest.skip("cannot run a process in a pid namespace of its own here")
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_killed_writers_temporary_folder_is_ignored_and_removed(tmp_path):
    path = save(tmp_path, 1, build("single"))
    alive, killed = writer(tmp_path), writer(tmp_path)
    end(killed)
    assert newest(tmp_path) == path
    save(tmp_path, 3, build("single"))
    (left,) = tmp_path.glob(".step-*.tmp")
    assert f"-{alive.pid}-" in left.name, "a living process still writes it"
    end(alive)
    assert remove_dead_temporaries(tmp_path) == [left]


def test_what_another_container_with_the_same_host_name_writes_is_left_alone(tmp_path):
    process = writer(tmp_path, "unshare", "--pid", "--fork", "--kill-child")
    end(process)
    (left,) = tmp_path.glob(".step-*.tmp")
    assert socket.gethostname() not in left.name
    assert remove_dead_temporaries(tmp_path) == [] and left.exists()


def test_shared_temporaries_of_earlier_starts_are_removed(tmp_path):
    earlier, own, private = (
        shared_temporary(tmp_path, 4, "0" * 16),
        shared_temporary(tmp_path, 4, "1" * 16),
        new_temporary(tmp_path, 4),
    )
    for folder in (earlier, own, private):
        folder.mkdir()
    assert remove_earlier_starts(tmp_path, "1" * 16) == [earlier]
    assert own.exists() and private.exists()
