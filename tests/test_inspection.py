"""`holdfast inspect` names what a path is, counts right, and exits with 1 when something is wrong."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.data.indexed import HEADER, IndexedDatasetBuilder
from holdfast.inspection import inspect_path
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import build_tokenizer
from holdfast.tokenizers.training import train_tokenizer


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    train_tokenizer(["some words to learn from, some more words"], tmp_path, 300)
    tokenizer = build_tokenizer("GPT2BPETokenizer", tmp_path / "vocab.json", tmp_path / "merges.txt")
    builder = IndexedDatasetBuilder(tmp_path / "data", np.uint16)
    for text in ("some words", "", "more words to learn"):
        ids = tokenizer.encode(text)
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize()
    return tmp_path / "data"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "holdfast.cli", "inspect", *words], capture_output=True, text=True)


def test_a_dataset_is_counted_and_shown_as_text(dataset: Path) -> None:
    files = ["--vocab-file", str(dataset.parent / "vocab.json"), "--merge-file", str(dataset.parent / "merges.txt")]
    done = run(str(dataset), *files, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["kind"] == "dataset"
    assert (facts["documents"], facts["sequences"], facts["empty_documents"]) == (3, 2, 1)
    assert facts["tokens"] * 2 == facts["bin_bytes"] == (dataset.parent / "data.bin").stat().st_size
    assert facts["texts"] == [["some words"], [], ["more words to learn"]]
    assert sum(facts["length_histogram"].values()) == 2
    shown = run(str(dataset) + ".idx", *files)
    assert "document 0: 'some words'" in shown.stdout


def test_a_wrong_pointer_and_a_foreign_vocabulary_are_problems(dataset: Path) -> None:
    (dataset.parent / "tiny.json").write_text('{"a": 0, "b": 1}')
    (dataset.parent / "none.txt").write_text("#version: 0.2\n")
    files = ["--vocab-file", str(dataset.parent / "tiny.json"), "--merge-file", str(dataset.parent / "none.txt")]
    assert "made with another tokenizer" in run(str(dataset), *files).stderr
    idx = dataset.parent / "data.idx"
    content = bytearray(idx.read_bytes())
    content[HEADER.size + 8 : HEADER.size + 16] = struct.pack("<q", 10_000)
    idx.write_bytes(bytes(content))
    done = run(str(dataset))
    assert done.returncode == 1
    assert "sequence 0 points outside data.bin" in done.stderr


def test_something_else_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(HoldfastError, match="is none of: dataset, run, snapshot, checkpoint"):
            inspect_path(path)


def test_what_cannot_be_read_is_named_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.pt").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        expected = {
            "fifo": "is a fifo",
            "socket": "is a socket",
            "/dev/zero": "is a device",
            "loop": "symbolic link that leads to itself",
            "broken": "symbolic link to .*nowhere, which does not exist",
            "empty": "is an empty folder",
            "empty.pt": "is an empty file",
            "missing": "there is no file, folder or dataset",
            "n" * 300: "cannot be read: File name too long",
        }
        for name, message in expected.items():
            with pytest.raises(HoldfastError, match=message):
                inspect_path(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "inspect", str(tmp_path / "fifo")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "is a fifo" in done.stderr and "Traceback" not in done.stderr
