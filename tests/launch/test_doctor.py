"""`holdfast doctor`: each verdict against a real folder, a real lock, a real srun."""

import fcntl
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.launch import doctor
from holdfast.launch.node_links import first_host
from tests.disks import small_disk
from tests.launch.conftest import Lab


def holdfast(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


def test_a_good_folder_passes_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    (check,) = doctor.check_folder("run", tmp_path)
    assert check.verdict in ("pass", "warn"), check  # warn: this disk may be nearly full
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_a_full_disk_fails_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "64k") as folder:
        with suppress(OSError):
            (folder / "fill").write_bytes(bytes(1 << 20))
        (check,) = doctor.check_folder("data", folder)
        assert check.verdict == "fail" and "a file cannot be written (No space left on device)" in check.found
        assert [path.name for path in folder.iterdir()] == ["fill"]


def test_a_lock_is_tried_by_a_second_process(tmp_path: Path) -> None:
    assert doctor.lock_excludes(tmp_path)
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and it is free again


def test_a_file_system_without_locks_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system of this machine lacks locks, so the answer of the one that does is put in its place."""
    monkeypatch.setattr(doctor, "lock_excludes", lambda folder: False)
    (check,) = doctor.check_folder("run", tmp_path)
    assert (check.verdict, "mount it with flock" in check.advice) == ("fail", True)


def test_too_little_shared_memory_fails_with_the_size_to_give(tmp_path: Path) -> None:
    (check,) = doctor.check_shared_memory(tmp_path, needed=1 << 60)
    assert check.verdict == "fail"
    assert f"--shm-size={1 << 30}g" in check.advice
    (check,) = doctor.check_shared_memory(tmp_path, needed=1)
    assert check.verdict == "pass"
    (check,) = doctor.check_shared_memory(tmp_path / "missing", needed=1)
    assert check.verdict == "fail"


@pytest.mark.parametrize(
    ("listed", "first"),
    [("n[7-9,12],m1", "n7"), ("node-a,node-b", "node-a"), ("gpu[001-004]", "gpu001"), ("one", "one")],
)
def test_the_first_host_of_slurms_lists(listed: str, first: str) -> None:
    assert first_host(listed) == first


def test_the_table_gives_advice_only_where_something_is_wrong() -> None:
    text = doctor.table([doctor.Check("a", "pass", "fine", "unused"), doctor.Check("b", "fail", "broken", "repair it")])
    assert text.splitlines() == ["pass  a  fine", "fail  b  broken", "         → repair it"]


def test_the_command_reports_and_exits_by_the_verdict(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[model]\nnum_layers = 2\nhidden_size = 64\nnum_attention_heads = 2\nvocab_size = 256\n")
    good = holdfast("doctor", config, "--folder", tmp_path, "--json", HOLDFAST_CACHE=str(tmp_path / "cache"))
    assert good.returncode == 0, good.stdout + good.stderr
    names = {check["name"]: check["verdict"] for check in json.loads(good.stdout)}
    assert {"python", "torch", "shared memory", "cache", f"folder {tmp_path}"} <= names.keys()
    config.write_text(config.read_text() + "[snapshot]\nsnapshot_dir = '/nowhere'\n")
    bad = holdfast("doctor", config, HOLDFAST_CACHE=str(tmp_path / "cache"))
    assert bad.returncode == 1
    assert "/nowhere is not a folder" in bad.stdout


@pytest.mark.slurm
def test_under_srun_the_links_between_nodes_are_measured(lab: Lab, shared: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "doctor", "--json", "--folder", str(shared)]
    done = lab.run("srun", "--nodes=3", "--ntasks-per-node=1", *command, HOLDFAST_CACHE=str(shared / "cache"))
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["slurm"]["verdict"] == "pass"
    assert checks["pyxis"]["verdict"] == ("pass" if lab.has_pyxis else "warn")
    linked = [name for name in checks if name.startswith("link to")]
    assert len(linked) == 2
    if lab.has_namespaces:
        assert linked == ["link to n2", "link to n3"]
    for name in linked:
        assert checks[name]["verdict"] != "fail", checks[name]
        assert "MB/s" in checks[name]["found"]
    assert [path for path in shared.rglob("*") if "doctor" in path.name] == []
