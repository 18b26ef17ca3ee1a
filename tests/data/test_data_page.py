"""The Python examples of docs/data.md run as they stand there."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.megatron_oracle import write_dataset, write_sequences
from tests.fenced_blocks import ROOT, python_blocks

PAGE = ROOT / "docs" / "data.md"


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(Path("corpus_text_document"), [50] * 100)
    sentences = np.full(1000, 5, dtype=np.uint16), [10] * 100, list(range(0, 101, 5))
    write_sequences(Path("sentences_text_sentence"), *sentences)
    Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n##s\n")
    names: dict[str, object] = {}
    exec(compile("\n".join(python_blocks(PAGE)), str(PAGE), "exec"), names)
    assert {"train", "batch", "samples"} <= names.keys()
