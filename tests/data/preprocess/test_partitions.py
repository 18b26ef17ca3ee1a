"""Shares made one by one, in any order, merge to the bytes of one run; finished ones are not made again."""

import fcntl
import gzip
import json
from pathlib import Path

import pytest

from holdfast import preprocess
from holdfast.data.preprocess.provenance import Summary
from holdfast.system.errors import HoldfastError, UsageError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import dataset_bytes, megatron_documents, pair, prose


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return prose(1500, seed=6)


def test_shares_merge_to_the_bytes_of_one_run(tmp_path: Path, small_bpe: TokenizerFiles, lines: list[bytes]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines[:1000]) + b"\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[1000:]), 1))
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]

    def run(index: int | None) -> bool:
        return preprocess(
            inputs,
            tmp_path / "out",
            **small_bpe.arguments(),  # type: ignore[arg-type]
            append_eod=True,
            partitions=3,
            partition_index=index,
        ).already_complete

    assert not run(2)
    assert not run(0)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out_?_text_document.*")}
    assert len(stamps) == 4
    assert run(0)
    run(None)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    expected = dataset_bytes(megatron_documents(lines, "text", small_bpe.build(), True))
    assert pair(tmp_path / "out_text_document") == expected


def test_more_shares_than_units_leave_some_empty(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    few = prose(5)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(few))
    summary = preprocess(tmp_path / "a.jsonl", tmp_path / "out", **small_bpe.arguments(), partitions=4)  # type: ignore[arg-type]
    assert summary.documents == 5
    assert pair(tmp_path / "out_text_document") == dataset_bytes(
        megatron_documents(few, "text", small_bpe.build(), False)
    )


def test_a_second_join_is_refused_while_the_first_one_runs(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(prose(5)))

    def run(index: int | None) -> Summary:
        arguments = {**small_bpe.arguments(), "partitions": 2, "partition_index": index}
        return preprocess(tmp_path / "a.jsonl", tmp_path / "out", **arguments)  # type: ignore[arg-type]

    run(0)
    run(1)
    with (tmp_path / "out.joining").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(HoldfastError, match=r"another process joins the partitions .*out\.joining is locked"):
            run(None)
    assert not list(tmp_path.glob("out_text_document.*"))
    assert run(None).documents == 5
    assert not (tmp_path / "out.joining").exists()


def test_the_joined_dataset_has_a_record_and_replaces_no_other(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*prose(3), b"bad", *prose(3, 1)]))
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(prose(5)))

    def run(name: str, **settings: object) -> Summary:
        return preprocess(tmp_path / name, tmp_path / "out", **small_bpe.arguments(), partitions=2, **settings)  # type: ignore[arg-type]

    joined = run("a.jsonl", on_bad_line="skip")
    record = json.loads((tmp_path / "out.json").read_bytes())
    assert joined.provenance == str(tmp_path / "out.json")
    assert record["tokenizer"]["type"] == "GPT2BPETokenizer"
    assert record["outputs"][0]["bin_bytes"] == (tmp_path / "out_text_document.bin").stat().st_size
    assert record["outputs"][0]["idx_bytes"] == (tmp_path / "out_text_document.idx").stat().st_size
    assert b'"line":4' in (tmp_path / "out.bad.jsonl").read_bytes()
    assert run("a.jsonl", on_bad_line="skip").already_complete
    before = pair(tmp_path / "out_text_document")
    with pytest.raises(HoldfastError, match="--overwrite"):
        run("b.jsonl")
    assert pair(tmp_path / "out_text_document") == before
    assert run("b.jsonl", overwrite=True).documents == 5
    assert not (tmp_path / "out.bad.jsonl").exists() and not (tmp_path / "out.joining").exists()


@pytest.mark.parametrize(
    ("source", "index", "message"), [("a.jsonl", 4, "count from 0 to 3"), ("-", None, "cannot be partitioned")]
)
def test_what_cannot_be_shared_is_refused(
    tmp_path: Path, small_bpe: TokenizerFiles, source: str, index: int | None, message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}')
    name = source if source == "-" else tmp_path / source
    with pytest.raises(UsageError, match=message):
        preprocess(name, tmp_path / "out", **small_bpe.arguments(), partitions=4, partition_index=index)  # type: ignore[arg-type]
