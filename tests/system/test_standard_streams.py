"""Closed descriptors and locales without our characters: real processes with the streams that a shell gives them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOLDFAST = [sys.executable, "-m", "holdfast"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def in_ascii(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs the program in a locale of ASCII, as old ones such as de_DE.ISO-8859-1 are: not UTF-8."""
    return subprocess.run(
        [*HOLDFAST, *arguments], env={**os.environ, **ASCII, **variables}, cwd=folder, capture_output=True, timeout=60
    )


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["completion", "fish"]])
def test_a_file_or_pipe_gets_utf_8_in_any_locale(arguments):
    done = in_ascii(*arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "×" in done.stdout.decode()


def test_the_encoding_that_the_user_names_is_used_and_what_it_lacks_is_replaced():
    done = in_ascii("--help", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and "Megatron ? Hugging Face" in done.stdout.decode("latin-1")
    assert "TP × PP" in done.stdout.decode("latin-1")


def test_a_configuration_is_utf_8_in_any_locale(tmp_path):
    (tmp_path / "c.toml").write_text('[data]\ndata_path = ["dätä/corpus"]\n', encoding="utf-8")
    done = in_ascii("train", "c.toml", "--print-config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'data_path = ["dätä/corpus"]' in done.stdout.decode()
    (tmp_path / "printed.toml").write_bytes(done.stdout)
    assert in_ascii("train", "printed.toml", "--print-config", folder=tmp_path).stdout == done.stdout


def test_a_name_that_is_not_utf_8_is_printed_as_it_is_and_refused_where_a_file_would_hold_it(tmp_path):
    name = os.fsdecode(b"corpus\xff.jsonl")
    (tmp_path / name).write_text('{"text": "a"}\n')

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*HOLDFAST, *arguments], cwd=tmp_path, capture_output=True, timeout=60)

    done = run("init", os.fsdecode(b"my\xff"), "--input", str(Path(__file__)))
    assert done.returncode == 0 and done.stdout == b"my\xff/model.toml\nmy\xff/Makefile\n"
    done = run("init", "model", "--input", name)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"is not UTF-8 text" in done.stderr, done.stderr


def test_closed_descriptors_are_open_again_and_no_file_takes_their_number(tmp_path):
    program = (
        "import json, os, sys\n"
        "from holdfast.system.standard_streams import prepare_standard_streams\n"
        "prepare_standard_streams()\n"
        "file = open(sys.argv[1], 'w')\n"
        "print('out'); print('err', file=sys.stderr); os.system('echo of a child; echo error >&2')\n"
        "json.dump([file.fileno() > 2, [os.readlink(f'/proc/self/fd/{n}') for n in range(3)], sys.stdin.read()], file)\n"
    )
    command = f'exec {sys.executable} -c "$PROGRAM" {tmp_path}/file <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command], env={**os.environ, "PROGRAM": program}, timeout=60)
    assert done.returncode == 0
    assert json.loads((tmp_path / "file").read_text()) == [True, ["/dev/null"] * 3, ""]


def test_a_verb_works_with_closed_streams(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    command = f"exec {sys.executable} -m holdfast init model --input corpus.jsonl <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "model" / "Makefile").is_file()
