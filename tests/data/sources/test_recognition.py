"""A file of another format is named, with a command that converts it; the command, run as printed, gives an input that works."""

import bz2
import gzip
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from holdfast import preprocess
from holdfast.data.sources.texts import Texts
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles

RECORDS = [{"id": 1, "text": "Grüße, wörld, with commas"}, {"id": 2, "text": 'second "line"\nand more'}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
CSV = 'id,text\n1,"Grüße, wörld, with commas"\n2,"second ""line""\nand more"\n'
FORMATS = {
    "a.json": (json.dumps(RECORDS, indent=2), "one JSON array"),
    "on one line.json": (json.dumps(RECORDS), "one JSON array"),
    "b.jsonl": ("\n".join(json.dumps(record, indent=4) for record in RECORDS), "spread over several lines"),
    "c.json": ("\n".join(json.dumps(record, indent=0) for record in RECORDS), "spread over several lines"),
    "it's.csv": (CSV, "CSV with the columns id, text"),
    "no-suffix": (CSV, "CSV with the columns id, text"),
    "d.tsv": (
        CSV.replace("id,text", "id\ttext").replace("1,", "1\t").replace("2,", "2\t"),
        "TSV with the columns id, text",
    ),
}
ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32")


def explanation(path: Path, **settings: object) -> str:
    with pytest.raises(HoldfastError) as failure:
        list(Texts([path], **settings))  # type: ignore[arg-type]
    return str(failure.value)


def run_as_printed(message: str) -> Path:
    """Runs the command of a message, and gives the file that it writes."""
    found = re.search(r"((?:gzip|bzip2|iconv|jq|python3) .*? > ('[^>]*'|\S+?))(?:, then|$)", message)
    assert found, message
    tool = found[1].split()[0]
    if not all(map(shutil.which, {tool, "jq" if "jq" in found[1] else tool})):
        pytest.skip(f"{tool} is not on this machine")
    command = f"set -eo pipefail; {found[1]}; printf %s {found[2]}"
    return Path(subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("compress", [None, gzip.compress, bz2.compress], ids=["plain", "gz", "bz2"])
def test_another_format_is_named_and_the_printed_command_converts_it(
    tmp_path: Path, name: str, compress: object
) -> None:
    content, named = FORMATS[name]
    path = tmp_path / name
    path.write_text(content)
    if compress:
        path = tmp_path / f"{name}.{'gz' if compress is gzip.compress else 'bz2'}"
        path.write_bytes(compress(content.encode()))  # type: ignore[operator]
    message = explanation(path)
    assert f"{path} is not JSON lines (line 1: " in message and named in message
    assert list(Texts([run_as_printed(message)])) == [record["text"] for record in RECORDS]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a"])
def test_utf_16_is_named_and_the_printed_command_converts_it(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(LINES.encode(encoding))
    message = explanation(path, on_bad_line="skip")
    assert (
        f"{path}: the file is {encoding.upper().replace('-LE', 'LE').replace('-BE', 'BE')} and must be UTF-8" in message
    )
    texts = list(Texts([run_as_printed(message)]))
    assert texts == ([LINES] if name == "a.txt" else [record["text"] for record in RECORDS])


def test_archives_and_plain_text_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", LINES)
    assert "a zip archive: unpack it" in explanation(tmp_path / "a.zip")
    (tmp_path / "a.jsonl").write_text(LINES)
    shutil.make_archive(str(tmp_path / "b"), "gztar", tmp_path, "a.jsonl")
    assert "a tar archive: unpack it" in explanation(tmp_path / "b.tar.gz")
    (tmp_path / "story").write_text("It was a dark night, and stormy.\nThe rain fell, in torrents.\n")
    assert "needs a name that ends in .txt" in explanation(tmp_path / "story")


@pytest.mark.parametrize("content", ['{"text": "never ends\n{"text": "good"}\n', '["one"]\n["two"]\n'])
def test_a_bad_first_line_of_json_lines_is_only_a_bad_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    assert "a.jsonl:1: bad line at byte 0: " in explanation(tmp_path / "a.jsonl")


def test_a_missing_key_shows_those_that_are_there(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "7", "the content": "a longer text", "n": 1}\n')
    with pytest.raises(HoldfastError) as failure:
        preprocess(path, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert "it has no key 'text', only id, the content, n: name the key with --json-keys" in str(failure.value)
    assert "for example --json-keys 'the content'" in str(failure.value)
    path.write_text(json.dumps({f"key{number}": "x" for number in range(100)}))
    assert "key7 and 92 more: name the key" in explanation(path)


def test_the_first_line_of_a_text_is_not_taken_for_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"name,city\nJos\xe9,Lima\n")
    assert "a.txt:2: bad line at byte 13: it is not UTF-8" in explanation(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"Jos\xe9,Lima\nname,city\n")
    assert "a.txt:1: bad line at byte 3: it is not UTF-8" in explanation(tmp_path / "a.txt")


def test_an_input_of_bad_lines_alone_says_what_it_is(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    (tmp_path / "a.json").write_text(FORMATS["a.json"][0])
    with pytest.raises(HoldfastError, match="no document found; the file is one JSON array"):
        preprocess(tmp_path / "a.json", tmp_path / "out", **small_bpe.arguments(), on_bad_line="skip")  # type: ignore[arg-type]
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(HoldfastError, match="no document found; 1 bad line, and nothing else"):
        preprocess(tmp_path / "b.jsonl", tmp_path / "out", **small_bpe.arguments(), on_bad_line="skip")  # type: ignore[arg-type]
