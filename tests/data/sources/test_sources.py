"""Every form of input gives the bytes of the plain one, however it is compressed, cut and spread over files."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import preprocess
from holdfast.data.preprocess.units import Partition, plan
from holdfast.data.sources import InputFile, source_named
from holdfast.data.sources.compressed import decoding_starts
from holdfast.data.sources.inputs import find_inputs
from holdfast.data.sources.jsonl import _views, parse_lines
from holdfast.data.sources.lines import unit_lines, whole_lines
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import dataset_bytes, megatron_documents, pair, prose


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return prose(1200, seed=5)


@pytest.fixture(scope="module")
def content(lines: list[bytes]) -> bytes:
    return b"\n".join(lines) + b"\n"


@pytest.fixture(scope="module")
def expected(lines: list[bytes], small_bpe: TokenizerFiles) -> tuple[bytes, bytes]:
    return dataset_bytes(megatron_documents(lines, "text", small_bpe.build(), True))


def pieces(content: bytes, size: int) -> Iterator[bytes]:
    """Cuts that fall in the middle of lines."""
    return (content[start : start + size] for start in range(0, len(content), size))


def xz_with_blocks(content: bytes, size: int) -> bytes | None:
    """One xz stream of many blocks, as `xz -T` writes it; None where the tool is missing."""
    try:
        done = subprocess.run(["xz", "-T2", f"--block-size={size}", "-1", "-c"], input=content, capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout


def xz(content: bytes) -> bytes:
    return lzma.compress(content, preset=0)


def odd_frame(content: bytes) -> bytes:
    """A skippable frame, then a frame without its size and ends with a checksum."""
    compressor = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    return b"\x50\x2a\x4d\x18\x04\0\0\0skip" + compressor.compress(content)


COMPRESSED = {
    "gz": lambda content: gzip.compress(content, 1),
    "gz, two members": lambda content: b"".join(gzip.compress(piece, 1) for piece in pieces(content, 700_001)),
    "xz": xz,
    "xz, many blocks": lambda content: xz_with_blocks(content, 100_000) or b"".join(map(xz, pieces(content, 100_000))),
    "xz, many streams": lambda content: b"".join(map(xz, pieces(content, 100_001))),
    "xz, streams and padding": lambda content: b"\0\0\0\0".join(map(xz, pieces(content, 500_001))) + b"\0" * 8,
    "zst": lambda content: zstandard.compress(content, 1),
    "zst, many frames": lambda content: b"".join(zstandard.compress(piece, 1) for piece in pieces(content, 50_001)),
    "zst, many odd frames": lambda content: b"".join(map(odd_frame, pieces(content, 70_001))),
    "bz2": lambda content: bz2.compress(content, 1),
    "bz2, many streams": lambda content: b"".join(bz2.compress(piece, 1) for piece in pieces(content, 80_001)),
}


@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_input_gives_the_bytes_of_the_plain(
    tmp_path: Path, small_bpe: TokenizerFiles, content: bytes, expected: tuple[bytes, bytes], form: str
) -> None:
    source = tmp_path / f"a.jsonl.{form.split(',')[0]}"
    source.write_bytes(COMPRESSED[form](content))
    preprocess(source, tmp_path / "out", **small_bpe.arguments(), append_eod=True, workers=2)  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize("form", [form for form in COMPRESSED if "many" in form])
def test_what_can_be_read_in_parallel_is_cut_into_units(tmp_path: Path, content: bytes, form: str) -> None:
    source = tmp_path / "a"
    source.write_bytes(COMPRESSED[form](content))
    assert len(decoding_starts(str(source), form.split(",")[0])) > 5
    units = list(plan(find_inputs([source])))
    assert len(units) > 1
    assert b"".join(block for unit in units for block in unit_lines(unit)) == content


@pytest.mark.parametrize("form", COMPRESSED)
def test_a_truncated_file_is_named(tmp_path: Path, small_bpe: TokenizerFiles, content: bytes, form: str) -> None:
    whole = COMPRESSED[form](content)
    source = tmp_path / "a.jsonl"
    source.write_bytes(whole[: len(whole) - 400])
    with pytest.raises(HoldfastError, match=r"a\.jsonl"):
        preprocess(source, tmp_path / "out", **small_bpe.arguments(), on_bad_line="fail")  # type: ignore[arg-type]
    assert not list(tmp_path.glob("out_text*"))


@pytest.mark.parametrize("damage", [0x00, 0xFF, 0x80, 0x01])
def test_every_damaged_byte_at_the_end_of_an_xz_file_is_found_or_harmless(tmp_path: Path, damage: int) -> None:
    """The index and the footer say where the blocks are: what they say is checked."""
    text = b"line\n" * 1000
    whole, source = xz(text) + xz(b"") + xz(text), tmp_path / "a.jsonl.xz"
    for at in range(len(whole) - 60, len(whole)):
        source.write_bytes(whole[:at] + bytes([whole[at] ^ damage or damage]) + whole[at + 1 :])
        with contextlib.suppress(HoldfastError):
            units = list(plan(find_inputs([source])))
            assert b"".join(block for unit in units for block in unit_lines(unit)) == text * 2
    for length in range(6, 40):
        source.write_bytes(whole[:length])
        with pytest.raises(HoldfastError):
            list(plan(find_inputs([source])))


def test_a_pipe_that_is_given_by_name_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(HoldfastError, match="not a regular file; to read from a pipe, give --input -"):
        find_inputs([tmp_path / "pipe.jsonl"])


def test_many_files_compressed_in_one_piece_are_shared_out(
    tmp_path: Path, small_bpe: TokenizerFiles, lines: list[bytes], expected: tuple[bytes, bytes]
) -> None:
    (tmp_path / "shards").mkdir()
    for number in range(10):
        part = b"\n".join(lines[number * 120 : (number + 1) * 120]) + b"\n"
        (tmp_path / f"shards/{number}.jsonl.gz").write_bytes(gzip.compress(part, 1))
    assert all(unit.how == "stream" for unit in plan(find_inputs([tmp_path / "shards"])))
    preprocess(tmp_path / "shards", tmp_path / "out", **small_bpe.arguments(), append_eod=True, workers=2)  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == expected


def test_files_globs_and_folders_keep_the_order_of_their_names(
    tmp_path: Path, small_bpe: TokenizerFiles, lines: list[bytes], expected: tuple[bytes, bytes]
) -> None:
    (tmp_path / "in/b").mkdir(parents=True)
    (tmp_path / "in/a0.jsonl").write_bytes(b"\n".join(lines[:500]))
    (tmp_path / "in/a1.jsonl").write_bytes(b"\n".join(lines[500:900]) + b"\n")
    (tmp_path / "in/b/c.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(lines[900:])))
    (tmp_path / "in/README.md").write_text("not an input")
    (tmp_path / "in/.hidden.jsonl").write_text("not an input")
    preprocess(tmp_path / "in/a0.jsonl", tmp_path / "in/earlier", **small_bpe.arguments())  # type: ignore[arg-type]
    assert (tmp_path / "in/earlier.json").exists()
    forms = {
        "folder": [tmp_path / "in"],
        "glob": [f"{tmp_path}/in/a*.jsonl", tmp_path / "in/b/c.jsonl.zst"],
        "files": [tmp_path / "in/a0.jsonl", tmp_path / "in/a1.jsonl", tmp_path / "in/b/c.jsonl.zst"],
    }
    for name, inputs in forms.items():
        preprocess(inputs, tmp_path / name, **small_bpe.arguments(), append_eod=True)  # type: ignore[arg-type]
        assert pair(tmp_path / f"{name}_text_document") == expected, name


def test_in_a_folder_what_holdfast_writes_is_no_input_and_a_link_to_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    for own in ("out.preprocessing", "out_text_document.index/gpt-train-1", "out.run/launch"):
        (tmp_path / own).mkdir(parents=True)
        (tmp_path / own / "records.jsonl").write_text('{"text": "not an input"}')
    assert [file.path for file in find_inputs([tmp_path])] == [str(tmp_path / "a.jsonl")]
    assert capsys.readouterr().err.count("is left out: Holdfast writes folders of this name") == 3
    # The folder that is named is searched, whatever it is called.
    assert len(find_inputs([tmp_path / "out.run"])) == 1
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(HoldfastError, match=r"b\.jsonl: No such file"):
        find_inputs([tmp_path])


@pytest.mark.parametrize("form", ["plain", "gz", "zst"])
def test_standard_input(
    tmp_path: Path, small_bpe: TokenizerFiles, content: bytes, expected: tuple[bytes, bytes], form: str
) -> None:
    content = COMPRESSED[form](content) if form in COMPRESSED else content
    words = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "preprocess",
        "--input",
        "-",
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([*words, "--append-eod", *small_bpe.flags()], input=content, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert pair(tmp_path / "out_text_document") == expected


def test_parquet_columns_are_keys(
    tmp_path: Path, small_bpe: TokenizerFiles, lines: list[bytes], expected: tuple[bytes, bytes]
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [json.loads(line)["text"] for line in lines]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts, "parts": [[text, "", "x"] for text in texts]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    assert len(list(plan(find_inputs([tmp_path / "a.parquet"])))) == 12
    preprocess(
        tmp_path / "a.parquet",
        tmp_path / "out",
        **small_bpe.arguments(),  # type: ignore[arg-type]
        json_keys=["text", "parts"],
        append_eod=True,
        workers=2,
    )
    assert pair(tmp_path / "out_text_document") == expected
    as_lines = [json.dumps({"parts": [text, "", "x"]}).encode() for text in texts]
    assert pair(tmp_path / "out_parts_document") == dataset_bytes(
        megatron_documents(as_lines, "parts", small_bpe.build(), True)
    )


def test_a_null_in_parquet_is_a_bad_line_and_a_missing_column_is_named(
    tmp_path: Path, small_bpe: TokenizerFiles
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    with pytest.raises(HoldfastError, match=r"a\.parquet:2: bad line.*'text' is not a text"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    with pytest.raises(HoldfastError, match="no column 'body', only text: name the column"):
        preprocess(tmp_path / "a.parquet", tmp_path / "other", **small_bpe.arguments(), json_keys=["body"])  # type: ignore[arg-type]


def test_a_row_of_parquet_that_is_not_utf_8_is_a_bad_line(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"one", b"\xff\xfe", b"three"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(HoldfastError, match=r"a\.parquet:2: bad line.*'text' is not UTF-8"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    summary = preprocess(tmp_path / "a.parquet", tmp_path / "other", **small_bpe.arguments(), on_bad_line="skip")  # type: ignore[arg-type]
    assert (summary.documents, summary.bad_lines) == (2, 1)


def test_a_changed_byte_in_parquet_is_found_by_the_checksum_of_its_page(
    tmp_path: Path, small_bpe: TokenizerFiles
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["some text", "another text"]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="none", write_page_checksum=True)
    content = (tmp_path / "a.parquet").read_bytes()
    at = content.index(b"another text")
    (tmp_path / "a.parquet").write_bytes(content[:at] + b"b" + content[at + 1 :])
    with pytest.raises(HoldfastError, match=r"a\.parquet is a damaged Parquet file"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]


def test_two_columns_of_one_name_in_parquet_are_named(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [pyarrow.array(["one"]), pyarrow.array(["two"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(HoldfastError, match=r"a\.parquet has several columns 'text'"):
        preprocess(tmp_path / "a.parquet", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]


def test_a_text_file_is_one_document(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    texts = ["first file\n\nwith paragraphs\n", "second file, without a last line break"]
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8-sig")  # its mark is no part of the text
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(texts[1].encode()))
    preprocess([tmp_path / "a.txt", tmp_path / "b.txt.gz"], tmp_path / "out", **small_bpe.arguments(), append_eod=True)  # type: ignore[arg-type]
    as_lines = [json.dumps({"text": text}).encode() for text in texts]
    assert pair(tmp_path / "out_text_document") == dataset_bytes(
        megatron_documents(as_lines, "text", small_bpe.build(), True)
    )
    (tmp_path / "c.txt").write_bytes(b"line one\nbad \xff byte")
    with pytest.raises(HoldfastError, match=r"c\.txt:2: bad line at byte 13: it is not UTF-8"):
        preprocess(tmp_path / "c.txt", tmp_path / "other", **small_bpe.arguments())  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"x")), max_size=20),
    st.booleans(),
    st.integers(1, 40),
)
def test_wherever_a_file_is_cut_each_line_is_read_once(made: list[bytes], newline: bool, unit_bytes: int) -> None:
    import tempfile

    content = b"\n".join(made) + (b"\n" if newline else b"")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a")
        Path(path).write_bytes(content)
        file = InputFile(0, path, "jsonl", "", len(content))
        units = list(source_named("jsonl").units(file, unit_bytes))
        blocks = [block for unit in units for block in unit_lines(unit)]
    assert b"".join(blocks) == content
    assert all(block.endswith(b"\n") for block in blocks[:-1])


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 20))
def test_blocks_of_whole_lines_lose_nothing(parts: list[bytes], size: int) -> None:
    blocks = list(whole_lines(iter(parts), size))
    assert b"".join(blocks) == b"".join(parts)
    assert all(block.endswith(b"\n") for block in blocks[:-1])


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 9))
def test_shares_cover_every_position_once(positions: list[int], count: int) -> None:
    for position in positions:
        assert sum(Partition(index, count).owns(position, 1001) for index in range(count)) == 1


@pytest.mark.parametrize("length", [10, 5_000], ids=["short", "long"])
@settings(max_examples=50)
@given(
    kinds=st.lists(st.sampled_from(["text", "blank", "crlf", "null", "broken", "list"]), max_size=12), end=st.booleans()
)
def test_each_line_is_a_document_or_bad_or_blank_however_long_lines_are(
    length: int, kinds: list[str], end: bool
) -> None:
    text = "ä" * length
    line = {
        "text": json.dumps({"text": text}, ensure_ascii=False).encode(),
        "blank": b"",
        "crlf": json.dumps({"text": text}).encode() + b"\r",
        "null": b'{"text": null}',
        "broken": b'{"text": "' + text.encode(),
        "list": json.dumps({"text": [text, "b"]}).encode(),
    }
    data = b"\n".join(line[kind] for kind in kinds) + (b"\n" if end and kinds else b"")
    batch = parse_lines(data, ["text"])
    documents = [[text, "b"] if kind == "list" else text for kind in kinds if kind in ("text", "crlf", "list")]
    assert batch.values == [documents] and batch.size == len(data)
    assert [bad.line for bad in batch.bad] == [i for i, kind in enumerate(kinds) if kind in ("null", "broken")]
    lines = data.split(b"\n")
    assert batch.lines == len(lines) - (not lines[-1])
    assert [bytes(view) for view in _views(data)] == lines[: batch.lines]
