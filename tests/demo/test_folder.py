"""The demo removes nothing that it did not write."""

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.demo.folder import claim, remove
from holdfast.system.errors import HoldfastError

OWN = ("tokenizer/vocab.json", "huggingface/model.safetensors", "stdlib-notes/a.txt", "stdlib.txt")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("flags", [[], ["--no-keep"]])
def test_a_folder_of_the_users_is_refused_and_left_as_it_is(tmp_path: Path, flags: list[str]) -> None:
    write(tmp_path, *OWN)
    command = [sys.executable, "-m", "holdfast.cli", "demo", "--workdir", str(tmp_path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"--workdir {tmp_path}/holdfast-demo" in done.stderr
    assert files_in(tmp_path) == sorted(OWN)


def test_the_next_demo_removes_only_what_the_last_one_wrote(tmp_path: Path) -> None:
    work = tmp_path / "demo"
    claim(work)
    write(
        work, "tokenizer/vocab.json", "stdlib_text_document.bin", "corpus.jsonl", "longer/config.toml", "stdlib-2.txt"
    )
    claim(work)
    assert files_in(work) == [".holdfast-demo", "longer/config.toml", "stdlib-2.txt"]
    remove(work)
    assert files_in(work) == ["longer/config.toml", "stdlib-2.txt"]


def test_without_anything_else_in_it_the_folder_goes_with_the_demo(tmp_path: Path) -> None:
    work = tmp_path / "demo"
    claim(work)
    write(work, "huggingface/config.json")
    remove(work)
    assert not work.exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, "demo")
    with pytest.raises(HoldfastError, match="demo is not a folder"):
        claim(tmp_path / "demo")
