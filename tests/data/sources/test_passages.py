"""Text files with several documents: blank lines separate them, wherever the file is cut into units."""

import gzip
from pathlib import Path

import pytest

from holdfast import preprocess
from holdfast.data.indexed import IndexedDataset
from holdfast.data.sources import BadLine
from holdfast.data.sources.inputs import find_inputs
from holdfast.data.sources.passages import read, units
from tests.data.conftest import TokenizerFiles

TEXT = "\n\nFirst line.\nSecond line.\n\n\n  \t\nAnother document.\n \nThird,\n  indented.\n"
DOCUMENTS = ["First line.\nSecond line.", "Another document.", "Third,\n  indented."]


def documents_of(path: Path, unit_bytes: int) -> tuple[list[str], list[BadLine], int]:
    (file,) = find_inputs([path], blank_line_documents=True)
    batches = [batch for unit in units(file, unit_bytes) for batch in read(unit, ["text"])]
    found = [value for batch in batches for value in batch.values[0]]
    return found, [bad for batch in batches for bad in batch.bad], sum(batch.lines for batch in batches)  # type: ignore[return-value]


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("\n", "\r\n"), TEXT.rstrip()], ids=["lf", "crlf", "no end"])
@pytest.mark.parametrize("unit_bytes", [1, 1000])
def test_blank_lines_separate_documents(tmp_path: Path, text: str, unit_bytes: int) -> None:
    path = tmp_path / "passages.txt"
    path.write_bytes(text.encode())
    found, bad, lines = documents_of(path, unit_bytes)
    assert [document.replace("\r", "") for document in found] == DOCUMENTS
    assert not bad
    assert lines == text.count("\n") + (not text.endswith("\n"))


@pytest.mark.parametrize("text", [TEXT, TEXT.lstrip()], ids=["blank", "text"])
@pytest.mark.parametrize("unit_bytes", [1, 1000])
def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path: Path, text: str, unit_bytes: int) -> None:
    path = tmp_path / "passages.txt"
    path.write_bytes(text.encode("utf-8-sig"))
    found, bad, lines = documents_of(path, unit_bytes)
    assert (found, bad, lines) == (DOCUMENTS, [], text.count("\n"))
    path.write_bytes("One.\n\n\ufeffTwo.\n".encode())
    assert documents_of(path, unit_bytes)[0] == ["One.", "\ufeffTwo."]


def test_large_file_is_cut_into_units_of_whole_documents(tmp_path: Path) -> None:
    expected = [f"Document {number}.\nIt has two lines." for number in range(100_000)]
    path = tmp_path / "passages.txt.gz"
    path.write_bytes(gzip.compress("\n\n".join(expected).encode(), 1))
    (file,) = find_inputs([path], blank_line_documents=True)
    assert len(list(units(file, 1 << 18))) > 1
    assert documents_of(path, 1 << 18)[0] == expected


def test_passage_that_is_not_utf8_is_bad_and_the_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "passages.txt"
    path.write_bytes(b"good\n\nbad\nhere \xff\n\ngood too\n")
    found, bad, _ = documents_of(path, 1000)
    assert found == ["good", "good too"]
    assert [(line.line, line.offset) for line in bad] == [(3, 15)]


def test_preprocess_takes_passages_only_on_request(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    path = tmp_path / "passages.txt"
    path.write_text(TEXT)
    arguments = {**small_bpe.arguments(), "workers": 1}
    one = preprocess(path, tmp_path / "one", **arguments)  # type: ignore[arg-type]
    several = preprocess(path, tmp_path / "several", **arguments, blank_line_documents=True)  # type: ignore[arg-type]
    assert (one.documents, several.documents) == (1, 3)
    data, tokenizer = IndexedDataset(several.outputs[0]), small_bpe.build()
    assert [tokenizer.decode(data[number].tolist()) for number in range(3)] == DOCUMENTS
