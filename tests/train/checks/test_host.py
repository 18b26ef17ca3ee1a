"""What this host must provide for snapshots: a memory file system."""

from pathlib import Path

import pytest

from holdfast.config import Config, TrainConfig
from holdfast.system.errors import HoldfastError
from holdfast.train.checks.host import check_host, check_memory, file_system_of
from tests.disks import small_disk


def test_a_snapshot_folder_that_does_not_exist_is_refused_and_not_made(tmp_path):
    with pytest.raises(HoldfastError, match="--snapshot-dir .*nope is not a folder"):
        check_memory(str(tmp_path / "nope"))
    assert not (tmp_path / "nope").exists()


def test_a_snapshot_folder_on_a_disk_is_warned_of(tmp_path):
    with small_disk(tmp_path / "with a space", "1m") as memory:
        assert file_system_of(memory) == "tmpfs"
        assert check_memory(str(memory)) == []
    assert file_system_of(Path("/proc/self")) == "proc"
    (warning,) = check_memory("/proc/self")
    assert "--snapshot-dir /proc/self is on proc, not in memory" in warning


def test_mount_points_may_have_any_name(tmp_path):
    folder, table = tmp_path / "über uns", tmp_path / "mounts"
    point = str(folder).replace(" ", "\\040").encode()
    table.write_bytes(b"disk / ext4 rw 0 0\nother /\xff xfs rw 0 0\nmemory " + point + b" ramfs rw 0 0\n")
    assert file_system_of(folder / "inside", table) == "ramfs"
    assert file_system_of(tmp_path, table) == "ext4"


def test_a_run_without_save_is_warned_of():
    (warning,) = check_host(Config())
    assert "no --save: this run keeps nothing" in warning
    assert check_host(Config(train=TrainConfig(save="run"))) == []
