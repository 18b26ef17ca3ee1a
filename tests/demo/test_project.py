"""`holdfast init` writes a folder in which `make` trains and generates."""

import json
import subprocess

import pytest

from holdfast.cli import run
from holdfast.config import read_config
from holdfast.system.errors import UsageError


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    line = "the quick brown fox jumps over the lazy dog and runs through the green forest "
    path.write_text("".join(json.dumps({"text": f"{number} {line * 20}"}) + "\n" for number in range(60)))
    return path


@pytest.mark.slow
@pytest.mark.distributed
def test_make_trains_and_generates(tmp_path, corpus, capsys):
    folder = tmp_path / "my-model"
    run(["init", str(folder), "--input", str(corpus), "--vocab-size", "300", "--train-iters", "4"])
    assert capsys.readouterr().out.split() == [str(folder / "model.toml"), str(folder / "Makefile")]
    assert read_config(folder / "model.toml").train.train_iters == 4
    done = subprocess.run(
        ["make", "-C", str(folder), "train", "generate", "report", "evaluate", "PROMPT=the quick"],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the quick" in done.stdout and "bits per byte" in done.stdout
    assert (folder / "report.html").stat().st_size > 1000


def test_inputs_may_have_characters_that_the_shell_and_make_treat_specially(tmp_path, monkeypatch):
    place = tmp_path / "my $HOME & 'files' #1 100%"
    place.mkdir()
    (place / "a;b.jsonl").write_text("{}")
    monkeypatch.chdir(place)
    run(["init", str(tmp_path / "model"), "--input", "a;b.jsonl"])
    program = tmp_path / "print-arguments"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    command = ["make", "-s", "-C", str(tmp_path / "model"), f"HOLDFAST={program}", "tokenizer/vocab.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[2:4] == ["--input", str(place / "a;b.jsonl")], done.stderr


def test_a_prompt_reaches_the_program_as_it_is_and_without_a_run_make_train_is_named(tmp_path, corpus):
    folder = tmp_path / "model"
    run(["init", str(folder), "--input", str(corpus)])

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "-s", "-C", str(folder), "HOLDFAST=printf '%s|'", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    for goal in ("generate", "report", "evaluate"):
        done = make(goal)
        assert done.returncode == 2 and done.stdout == "" and "there is no run yet; first: make train" in done.stderr
    (folder / "run").mkdir()
    prompt = 'it\'s a "test" of `pwd`; \\n'
    assert make("generate", f"PROMPT={prompt}").stdout == f"generate|run|--prompt|{prompt}|"
    assert make("generate").stdout == "generate|run|--prompt|The|"


def test_a_path_that_no_makefile_can_name_and_numbers_below_1_are_refused(tmp_path):
    (tmp_path / "a\\b.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="backslash"):
        run(["init", str(tmp_path / "model"), "--input", str(tmp_path / "a\\b.jsonl")])
    with pytest.raises(UsageError, match="--train-iters 0: give at least 1"):
        run(["init", str(tmp_path / "model"), "--input", str(tmp_path), "--train-iters", "0"])
    assert not (tmp_path / "model").exists()


def test_nothing_is_replaced_and_inputs_must_exist(tmp_path, corpus):
    with pytest.raises(UsageError, match="no such file"):
        run(["init", str(tmp_path / "a"), "--input", str(tmp_path / "none.jsonl")])
    (tmp_path / "Makefile").write_text("mine")
    with pytest.raises(UsageError, match="Makefile exists"):
        run(["init", str(tmp_path), "--input", str(corpus)])
    assert not (tmp_path / "model.toml").exists() and not (tmp_path / "a").exists()
