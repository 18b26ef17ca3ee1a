"""Folders and disks as they are: read-only, full, not a folder at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import fetch
from holdfast.assets.cache import safe_name
from holdfast.system.errors import HoldfastError
from tests.assets.loopback import some_bytes
from tests.assets.test_fetching import files_in

CONTENT = some_bytes(1_000_000)
LISTING = ["find", ".", "-type", "f"]


def fetch_command(url: str, cache: Path) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli", "fetch", url, "--cache-dir", str(cache)]


def in_namespace(mount: str, *commands: list[str]) -> subprocess.CompletedProcess:
    """Runs commands where `mount` is in force, for them alone; skips where namespaces are not for us."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("needs user and mount namespaces")
    quoted = [" ".join(f"'{word}'" for word in command) for command in commands]
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-c", " ; ".join([f"{{ {mount}; }} || exit 99", *quoted])],
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("length", [True, False], ids=["announced length", "unannounced length"])
def test_a_full_disk_is_a_clear_error_and_gets_its_space_back(server, tmp_path, length):
    url = server.put("/vocab.json", CONTENT, length=length)
    disk = tmp_path / "disk"
    disk.mkdir()
    done = in_namespace(
        f"mount -t tmpfs -o size=512k tmpfs '{disk}'", fetch_command(url, disk), ["du", "-sk", str(disk)]
    )
    assert "no room left on the disk" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert int(done.stdout.split()[0]) <= 16, "kilobytes still used"
    assert len(server.requests) == 1, "a full disk is no reason to try again"


def test_a_read_only_cache_returns_its_files_and_names_a_missing_one(server, cache):
    present = server.put("/present.json", CONTENT)
    path = fetch(present)
    absent = server.put("/absent.json", CONTENT)
    read_only = f"mount --bind '{cache}' '{cache}' && mount -o remount,ro,bind '{cache}'"
    done = in_namespace(read_only, fetch_command(present, cache), fetch_command(absent, cache))
    assert done.stdout.strip() == str(path)
    assert done.returncode == 1
    assert f"{cache} cannot be written (Read-only file system)" in done.stderr and "--cache-dir" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert len(server.requests) == 1, "nothing is downloaded that cannot be kept"


def test_an_unwritable_folder_is_a_clear_error(server, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o555)
    command = fetch_command(server.put("/file", CONTENT), folder)
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and there is no setpriv to give that up")
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"{folder} cannot be written (Permission denied)" in done.stderr and "Traceback" not in done.stderr
    assert server.requests == []


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_cache_path_that_is_a_file_is_a_clear_error(server, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(HoldfastError, match="is not a folder"):
        fetch(server.put("/file", CONTENT), cache_dir=file / below)
    assert file.read_text() == "not a folder" and server.requests == []


def test_a_cache_that_is_cleared_under_the_holder_is_made_again(server, cache):
    def clear(handler, page):
        handler.serve(page, stop_after=300_000)
        shutil.rmtree(cache)

    url = server.put("/file", CONTENT, script=[clear])
    assert fetch(url, timeout=240).read_bytes() == CONTENT
    assert len(files_in(cache)) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2-vocab.json", "gpt2-vocab.json"),
        ("a/b/c.txt", "c.txt"),
        ("../../x", "x"),
        ("..", "download"),
        (".lease-000001", "lease-000001"),
        ("a\\b\\c.txt", "c.txt"),
        ("naïve file (1).txt", "naïve file (1).txt"),
        ("nul\0 and \n newline", "nul_ and _ newline"),
        ("", "download"),
        ("x" * 500 + ".jsonl.xz", "x" * 171 + ".jsonl.xz"),
    ],
)
def test_names_from_anywhere_are_fit_for_a_folder(text, name):
    assert safe_name(text) == name
