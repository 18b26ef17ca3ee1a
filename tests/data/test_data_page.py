"""The Python examples of docs/data.md run as they stand there."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.megatron_oracle import write_dataset, write_sequences

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def examples() -> str:
    """The indented blocks that begin with an import, one after the other."""
    blocks = PAGE.read_text().split("\n\n")
    code = [block for block in blocks if block.startswith("    from holdfast")]
    assert len(code) == 3
    return "\n".join(line[4:] for block in code for line in block.split("\n"))


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(Path("corpus_text_document"), [50] * 100)
    write_sequences(Path("corpus_text_sentence"), np.full(1000, 5, dtype=np.uint16), [10] * 100, list(range(0, 101, 5)))
    Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n##s\n")
    names: dict[str, object] = {}
    exec(compile(examples(), str(PAGE), "exec"), names)
    assert {"train", "batch", "samples"} <= names.keys()
