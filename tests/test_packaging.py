"""The wheel and the sdist as users install them: complete, and configurations are found by name. The checks run pinned tools."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from holdfast.config import read_config
from holdfast.config_files import known_configs
from holdfast.system.errors import UsageError

ROOT = Path(__file__).parents[1]


def build(target: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The folder that an installed wheel would put on sys.path."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build("wheel", ROOT, folder)) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def installed(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "100"}
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_carries_every_configuration_and_finds_them_by_name(unpacked, tmp_path):
    names = {file.name for file in (ROOT / "configs").glob("*.toml")}
    assert {file.name for file in (unpacked / "holdfast" / "configs").iterdir()} == names
    expected = installed(unpacked, tmp_path, "train", str(ROOT / "configs" / "gpt_tiny.toml"), "--print-config").stdout
    for name in ("gpt_tiny", "gpt_tiny.toml"):
        done = installed(unpacked, tmp_path, "train", name, "--print-config")
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    shown = installed(unpacked, tmp_path, "train", "--help").stdout
    assert "Number of transformer layers. (default: 12)" in shown


def test_the_wheel_contains_every_file_of_the_package(unpacked):
    source = ROOT / "src" / "holdfast"
    files = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert files <= {path.relative_to(unpacked / "holdfast") for path in (unpacked / "holdfast").rglob("*")}


def test_the_sdist_builds_the_same_wheel_and_contains_the_licence_and_no_build_output(unpacked, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= {path.name for path in source.iterdir()}
    assert not [path for path in source.rglob("*") if path.name in (".venv", "__pycache__")]
    with zipfile.ZipFile(build("wheel", source, tmp_path)) as archive:
        rebuilt = {name: archive.read(name) for name in archive.namelist() if "dist-info" not in name}
    here = {str(path.relative_to(unpacked)): path.read_bytes() for path in unpacked.rglob("*") if path.is_file()}
    assert rebuilt == {name: content for name, content in here.items() if "dist-info" not in name}
    assert "holdfast/py.typed" in rebuilt


def test_a_file_in_the_working_folder_wins_over_one_that_comes_with_holdfast(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_config("gpt_tiny") == read_config(ROOT / "configs" / "gpt_tiny.toml")
    (tmp_path / "gpt_tiny").mkdir()
    assert read_config("gpt_tiny") == read_config(ROOT / "configs" / "gpt_tiny.toml")
    (tmp_path / "gpt_tiny.toml").write_text("[model]\nnum_layers = 7\n")
    assert read_config("gpt_tiny").model.num_layers == read_config("gpt_tiny.toml").model.num_layers == 7


def test_an_unknown_name_lists_those_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match="gpt_tine: no such configuration file; those that come with Holdfast are .*gpt_tiny"
    ):
        read_config("gpt_tine")
    with pytest.raises(UsageError, match="no such configuration file$"):
        read_config("folder/gpt_tiny.toml")
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="is a folder; give its config.toml"):
        read_config("run")
    assert "gpt3_1.7b" in known_configs() and read_config("gpt3_1.7b").model.num_layers == 24


def test_the_hooks_of_pre_commit_and_make_check_run_the_same_pinned_tools():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    pinned = {line.split("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    (check,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tools <= pinned and all(tool in check for tool in tools)
