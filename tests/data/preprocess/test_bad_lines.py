"""No line is ever lost in silence: each kind of bad line stops the run with its place, or is skipped, counted and listed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import preprocess
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import dataset_bytes, megatron_documents, pair, prose

BAD_LINES = {
    "truncated": (b'{"text": "never ends', "not JSON"),
    "garbage": (b"hello", "not JSON"),
    "two objects": (b'{"text": "a"}{"text": "b"}', "not JSON"),
    "no object": (b'["text"]', "it is a list"),
    "a text": (b'"text"', "it is a text"),
    "missing key": (b'{"body": "x"}', "no key 'text'"),
    "null": (b'{"text": null}', "'text' is null"),
    "number": (b'{"text": 7}', "'text' is a number"),
    "object": (b'{"text": {"a": 1}}', "'text' is an object"),
    "list with a number": (b'{"text": ["a", 1]}', "'text' is a number"),
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "not UTF-8"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "half of a surrogate pair at character 1"),
    "raw control character": (b'{"text": "a\x01b"}', "not JSON"),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "byte order mark"),
    "too deep": (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
}


@pytest.fixture(scope="module")
def good_lines() -> list[bytes]:
    # Over the smallest unit of 256 KB several times, so that line numbers are added up over units.
    return prose(900, seed=1)


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_stops_the_run_with_its_place(
    tmp_path: Path, small_bpe: TokenizerFiles, good_lines: list[bytes], kind: str
) -> None:
    bad, reason = BAD_LINES[kind]
    lines = [*good_lines[:700], bad, *good_lines[700:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    offset = sum(len(line) + 1 for line in good_lines[:700])
    with pytest.raises(HoldfastError) as failure:
        preprocess(tmp_path / "a.jsonl", tmp_path / "out", **small_bpe.arguments(), workers=2)  # type: ignore[arg-type]
    message = str(failure.value)
    assert f"{tmp_path}/a.jsonl:701: bad line at byte {offset}: " in message
    assert reason in message
    assert "--on-bad-line skip" in message
    assert not list(tmp_path.glob("out_text*"))


def test_all_kinds_are_skipped_counted_and_listed(
    tmp_path: Path, small_bpe: TokenizerFiles, good_lines: list[bytes]
) -> None:
    lines = []
    places = {}
    for number, good in enumerate(good_lines):
        lines.append(good)
        if number % 60 == 0 and number // 60 < len(BAD_LINES):
            bad, reason = list(BAD_LINES.values())[number // 60]
            places[len(lines) + 1] = (sum(len(line) + 1 for line in lines), reason)
            lines.append(bad)
    assert len(places) == len(BAD_LINES)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    summary = preprocess(
        tmp_path / "a.jsonl",
        tmp_path / "out",
        **small_bpe.arguments(),  # type: ignore[arg-type]
        append_eod=True,
        workers=2,
        on_bad_line="skip",
    )
    assert summary.bad_lines == len(BAD_LINES)
    assert summary.documents == len(good_lines)
    assert pair(tmp_path / "out_text_document") == dataset_bytes(
        megatron_documents(good_lines, "text", small_bpe.build(), True)
    )
    listed = [json.loads(line) for line in (tmp_path / "out.bad.jsonl").read_text().splitlines()]
    assert {record["line"]: record["offset"] for record in listed} == {line: place[0] for line, place in places.items()}
    for record in listed:
        assert places[record["line"]][1] in record["reason"]
        assert record["file"] == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("policy", "code"), [("fail", 1), ("skip", 3)])
def test_the_exit_code_reports_bad_lines(tmp_path: Path, small_bpe: TokenizerFiles, policy: str, code: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": 1}\n')
    command = [sys.executable, "-m", "holdfast.cli", "preprocess", "--input", str(tmp_path / "a.jsonl")]
    command += ["--output-prefix", str(tmp_path / "out"), "--on-bad-line", policy, *small_bpe.flags()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("a.jsonl:2: bad line" in done.stderr) == (policy == "fail")
    assert ("1 bad line was left out" in done.stderr) == (policy == "skip")


def test_bad_lines_of_a_share_are_counted_from_the_beginning_of_the_file(
    tmp_path: Path, small_bpe: TokenizerFiles, good_lines: list[bytes]
) -> None:
    lines = [*good_lines[:800], b"bad", *good_lines[800:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    offset = sum(len(line) + 1 for line in good_lines[:800])
    with pytest.raises(HoldfastError, match=f"a.jsonl:801: bad line at byte {offset}:"):
        preprocess(tmp_path / "a.jsonl", tmp_path / "out", **small_bpe.arguments(), partitions=2, partition_index=1)  # type: ignore[arg-type]
