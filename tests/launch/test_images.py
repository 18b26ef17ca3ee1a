"""Building and importing images: the commands, the atomic import, and the Dockerfile as far as it runs without Docker."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import run
from holdfast.launch import images
from holdfast.system.errors import HoldfastError

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / images.DOCKERFILE


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs called docker and enroot that obey as the real ones would: neither can run here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "docker": 'case "$1" in image) cat "$STATE/digest" ;; build) echo "$@" >> "$STATE/built" ;; esac',
        "enroot": """
            echo "$@" >> "$STATE/imported"
            if [ -e "$STATE/broken" ]; then echo half > "$3"; exit 3; fi
            cat "$STATE/digest" > "$3" """,
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "digest").write_text("sha256:one\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path))
    return tmp_path


def imports(state: Path) -> int:
    return len((state / "imported").read_text().splitlines())


def test_an_image_is_imported_once_for_each_digest(engines: Path) -> None:
    squash = engines / "apps" / "holdfast.sqsh"
    for _ in range(2):
        images.import_image("holdfast:latest", squash, dry_run=False)
    assert (squash.read_text(), imports(engines)) == ("sha256:one\n", 1)
    (engines / "digest").write_text("sha256:two\n")
    images.import_image("holdfast:latest", squash, dry_run=False)
    assert (squash.read_text(), imports(engines)) == ("sha256:two\n", 2)


def test_a_failed_import_leaves_the_image_that_was_there(engines: Path) -> None:
    squash = engines / "apps" / "holdfast.sqsh"
    images.import_image("holdfast:latest", squash, dry_run=False)
    (engines / "digest").write_text("sha256:two\n")
    (engines / "broken").touch()
    with pytest.raises(HoldfastError, match="enroot failed with code 3"):
        images.import_image("holdfast:latest", squash, dry_run=False)
    assert squash.read_text() == "sha256:one\n"
    assert sorted(path.name for path in squash.parent.iterdir()) == ["holdfast.sqsh", "holdfast.sqsh.digest"]


def test_build_passes_base_and_efa_to_docker(engines: Path) -> None:
    built = images.build("mine:1", ROOT, "nvcr.io/nvidia/pytorch:25.06-py3", "1.48.0", dry_run=False)
    assert built == ["mine:1"]
    words = (engines / "built").read_text()
    assert "--build-arg BASE=nvcr.io/nvidia/pytorch:25.06-py3 --build-arg EFA_VERSION=1.48.0" in words


def test_dry_run_prints_commands_and_runs_none(engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["launch", "image", "build", "--tag", "mine:1", "--context", str(ROOT), "--dry-run"])
    run(["launch", "image", "import", "--tag", "mine:1", "--output", str(engines / "out.sqsh"), "--dry-run"])
    printed = capsys.readouterr().out
    assert "docker build --tag mine:1" in printed
    assert re.search(r"enroot import --output \S*\.tmp dockerd://mine:1", printed)
    run(["launch", "image", "build", "--tag", "mine:1", "--context", str(ROOT), "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out) == {"commands": [printed.splitlines()[0]]}
    assert not (engines / "built").exists() and not (engines / "imported").exists()


def test_the_linter_has_nothing_to_say_about_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    checked = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_base_image_has_a_fixed_version() -> None:
    base = next(rest for word, rest in instructions() if word == "ARG" and rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=\S+:[0-9.]+-py3", base)


def test_what_the_dockerfile_copies_and_installs_works_outside_of_it(tmp_path: Path) -> None:
    """Its COPY and RUN lines, in order, in an empty folder; the network stays out: packages are checked, not downloaded."""
    work = tmp_path / "opt"
    work.mkdir()
    site = tmp_path / "site"
    for word, rest in instructions():
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, work / target, into=len(sources) > 1)
        elif word == "RUN" and "pip install" in rest:
            command = rest.replace("python3 ", f"{sys.executable} ").replace(
                "pip install", f"{sys.executable} -m pip install"
            )
            command = command.replace("--requirement", "--dry-run --no-deps --no-index --find-links . --requirement")
            command = command.replace(
                "--no-deps --no-build-isolation .", f"--no-deps --no-build-isolation --target {site} ."
            )
            done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=work, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    pins = (work / "pins.txt").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert {"tokenizers", "safetensors", "httpx"} <= {pin.split("==")[0] for pin in pins}
    assert not {pin.split("==")[0] for pin in pins} & {"torch", "numpy"}
    for command in re.findall(r'CMD \["holdfast", "([\w-]+)"\]', DOCKERFILE.read_text()):
        environment = {**os.environ, "PYTHONPATH": str(site)}
        help_flag = [] if command.startswith("-") else ["--help"]
        shown = subprocess.run(
            [sys.executable, "-m", "holdfast.cli", command, *help_flag], env=environment, capture_output=True, text=True
        )
        assert shown.returncode == 0, shown.stderr


def copy(source: Path, target: Path, into: bool) -> None:
    target = target / source.name if into else target
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)
