"""`holdfast generate` as a user calls it."""

import io
import json

import pytest

from holdfast.cli import run
from holdfast.system.errors import HoldfastError, UsageError


def test_json_is_one_array_with_prompt_completion_text_and_tokens(gpt2, capsys):
    run(
        [
            "generate",
            str(gpt2.run),
            "--prompt",
            "the quick",
            "fox",
            "--max-new-tokens",
            "4",
            "--temperature",
            "0",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in found] == ["the quick", "fox"]
    for entry in found:
        assert entry["text"] == entry["prompt"] + entry["completion"] and len(entry["tokens"]) <= 4


def test_plain_output_is_text_on_stdout_with_a_line_between_texts(gpt2, capsys):
    run(["generate", str(gpt2.run), "--prompt", "fox", "--num-return-sequences", "2", "--max-new-tokens", "3"])
    out = capsys.readouterr().out
    assert out.startswith("fox") and "\n---\nfox" in out


def test_prompts_come_from_a_file_or_standard_input(gpt2, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("the lazy dog")
    monkeypatch.setattr("sys.stdin", io.StringIO("the lazy dog"))
    arguments = ["generate", str(gpt2.run), "--max-new-tokens", "3", "--temperature", "0", "--prompt-file"]
    run([*arguments, str(tmp_path / "prompt.txt")])
    from_file = capsys.readouterr().out
    run([*arguments, "-"])
    assert capsys.readouterr().out == from_file and from_file.startswith("the lazy dog")


def test_a_prompt_file_that_is_not_utf8_is_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "latin1.txt").write_bytes("na\u00efve".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin1\.txt is not UTF-8 text \(byte 2"):
        run(["generate", "model", "--prompt-file", str(tmp_path / "latin1.txt")])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfea"), "utf-8"))
    with pytest.raises(UsageError, match="standard input is not UTF-8"):
        run(["generate", "model", "--prompt-file", "-"])


def test_wrong_use_is_named(gpt2, tmp_path):
    with pytest.raises(UsageError, match="--prompt"):
        run(["generate", str(gpt2.run)])
    with pytest.raises(HoldfastError, match="missing"):
        run(["generate", str(tmp_path / "missing"), "--prompt", "a"])
    with pytest.raises(FileNotFoundError, match="prompt.txt"):
        run(["generate", str(gpt2.run), "--prompt-file", str(tmp_path / "prompt.txt")])
