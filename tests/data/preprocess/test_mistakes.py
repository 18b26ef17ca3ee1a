"""What a user may get wrong with the verbs of the data stage and `fetch`: one line that names the cause and the way out."""

import json
from pathlib import Path

import pytest

from holdfast.cli import run
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers.training import train_tokenizer
from tests.data.conftest import TokenizerFiles


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bpe: TokenizerFiles) -> Path:
    """Holds a.jsonl, out.bad.jsonl, an empty file, one that is not compressed, vocab.json, and the merges of two tokenizers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    assert small_bpe.merge_file
    Path("vocab.json").write_bytes(small_bpe.vocab_file.read_bytes())
    Path("merges.txt").write_bytes(small_bpe.merge_file.read_bytes())
    train_tokenizer(["quite other words, quite other merges"] * 9, tmp_path / "other", 290)
    Path("a.jsonl").write_text(json.dumps({"text": "some text"}))
    Path("empty.jsonl").touch()
    Path("out.bad.jsonl").write_text(json.dumps({"text": "a line that was fixed"}))
    Path("b.jsonl.gz").write_text("never compressed")
    return tmp_path


FILES = "--vocab-file vocab.json --merge-file merges.txt --workers 1"
MISTAKES = [
    (f"preprocess --output-prefix out {FILES} --input missing.jsonl", 1, "missing.jsonl does not exist"),
    (f"preprocess --output-prefix out {FILES} --input empty.jsonl", 1, "no document found; the input is empty"),
    (f"preprocess --output-prefix out {FILES} --input b.jsonl.gz", 1, "ends in .gz, but its content is not compressed"),
    (
        "preprocess --output-prefix out --vocab-file vocab.json --merge-file other/merges.txt --input a.jsonl",
        *(1, "do --vocab-file and --merge-file belong together?"),
    ),
    (f"preprocess --output-prefix a.jsonl/out {FILES} --input a.jsonl", 1, "a.jsonl is not a folder"),
    (f"preprocess --output-prefix out/ {FILES} --input a.jsonl", 2, "--output-prefix out/ is a folder"),
    (f"preprocess --output-prefix out {FILES} --input a.jsonl --json-keys a/b", 2, "cannot be empty or hold a slash"),
    (f"preprocess --output-prefix out {FILES} --input out.bad.jsonl", 2, "choose another --output-prefix"),
    ("tokenizer train --input a.jsonl --vocab-size 300 --output-dir a.jsonl", 1, "a.jsonl is not a folder"),
    ("tokenizer train --input empty.jsonl --vocab-size 300 --output-dir new", 1, "no text to learn"),
    ("merge --input nothing --output-prefix out", 1, "nothing.idx does not exist"),
    ("merge --input . --output-prefix out", 1, "holds no .idx file"),
    ("fetch a.jsonl", 2, "a.jsonl exists on this machine"),
    ("fetch gpt2 --timeout 0", 2, "more than 0 seconds"),
    ("fetch http://127.0.0.1:9/x --timeout 0.5", 1, "no byte received within 0.5 s"),
    ("fetch file:///nowhere/x --cache-dir a.jsonl", 1, "the cache a.jsonl is not a folder"),
]


@pytest.mark.parametrize(("call", "code", "message"), MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing_behind(folder: Path, call: str, code: int, message: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(HoldfastError) as failure:
        run(call.split())
    assert message in str(failure.value)
    assert isinstance(failure.value, UsageError) == (code == 2)
    assert sorted(path for path in folder.rglob("*") if folder / "cache" not in (path, *path.parents)) == before
