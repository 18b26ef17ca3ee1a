"""A run that stopped at a bad line goes on after the line is fixed or skipped, and gives the bytes of a fresh run."""

import gzip
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast.data.preprocess.units as plan
from holdfast import preprocess
from holdfast.data.preprocess.provenance import Summary
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import pair, prose

BAD = b'{"text": "the quote never ends}'


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small input is many units."""
    monkeypatch.setattr(plan, "SMALLEST_UNIT", 10_000)


def make(source: Path | list[Path], prefix: Path, files: TokenizerFiles, **settings: object) -> Summary:
    return preprocess(source, prefix, **files.arguments(), append_eod=True, workers=2, **settings)  # type: ignore[arg-type]


def stop_at_bad_line(source: Path | list[Path], prefix: Path, files: TokenizerFiles) -> None:
    with pytest.raises(HoldfastError, match="fix it, or pass --on-bad-line skip"):
        make(source, prefix, files)


def lines_with_bad(count: int, at: int, seed: int = 5) -> list[bytes]:
    lines = prose(count, seed)
    return [*lines[:at], BAD, *lines[at:]]


def assert_like_fresh(source: Path | list[Path], prefix: Path, files: TokenizerFiles, **settings: object) -> None:
    fresh = prefix.with_name("fresh")
    make(source, fresh, files, overwrite=True, **settings)
    assert pair(f"{prefix}_text_document") == pair(f"{fresh}_text_document")
    assert not Path(f"{prefix}.preprocessing").exists()


def test_the_same_call_with_skip_goes_on(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(b"\n".join(lines_with_bad(300, 250)))
    words = [
        sys.executable,
        "-c",
        "import holdfast.data.preprocess.units as p; p.SMALLEST_UNIT = 10_000; from holdfast.cli import main; main()",
    ]
    words += ["preprocess", "--input", str(source), "--output-prefix", str(out), *small_bpe.flags(), "--append-eod"]
    stopped = subprocess.run(words, capture_output=True, text=True)
    assert stopped.returncode == 1 and "a.jsonl:251: bad line" in stopped.stderr
    done = subprocess.run([*words, "--on-bad-line", "skip"], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "continuing after" in done.stderr and "1 bad line was left out" in done.stderr
    assert_like_fresh(source, out, small_bpe, on_bad_line="skip")
    assert (tmp_path / "out.bad.jsonl").read_bytes() == (tmp_path / "fresh.bad.jsonl").read_bytes()


@pytest.mark.parametrize(
    "fixed", [b'{"text": "the quote ends"}', b'{"text": "a line of another length, which moves all others"}']
)
def test_after_the_line_is_fixed_the_same_call_goes_on(
    tmp_path: Path, small_bpe: TokenizerFiles, capfd: pytest.CaptureFixture[str], fixed: bytes
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = lines_with_bad(300, 250)
    source.write_bytes(b"\n".join(lines))
    stop_at_bad_line(source, out, small_bpe)
    source.write_bytes(b"\n".join([*lines[:250], fixed, *lines[251:]]))
    capfd.readouterr()
    summary = make(source, out, small_bpe)
    assert summary.documents == 301
    seen = capfd.readouterr().err
    kept = int(seen.split("has changed since this run stopped; ")[1].split()[0])
    assert 200 < kept <= 250
    assert_like_fresh(source, out, small_bpe)
    assert make(source, out, small_bpe).already_complete


def test_of_several_files_only_the_changed_one_is_read_again(
    tmp_path: Path, small_bpe: TokenizerFiles, capfd: pytest.CaptureFixture[str]
) -> None:
    sources = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d.jsonl", "e.jsonl")]
    sources[0].write_bytes(b"\n".join(prose(50, 1)))
    sources[1].write_bytes(gzip.compress(b"\n".join(prose(50, 2))))
    sources[2].write_bytes(b"a text of its own")
    sources[3].write_bytes(b"\n".join(lines_with_bad(100, 0, 3)))
    sources[4].write_bytes(b"\n".join(prose(20, 4)))
    stop_at_bad_line(sources, tmp_path / "out", small_bpe)
    sources[3].write_bytes(b"\n".join(prose(100, 3)))
    capfd.readouterr()
    make(sources, tmp_path / "out", small_bpe)
    assert "continuing after 101 documents" in capfd.readouterr().err
    assert_like_fresh(sources, tmp_path / "out", small_bpe)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_whatever_was_changed_the_bytes_are_those_of_a_fresh_run(
    tmp_path: Path, small_bpe: TokenizerFiles, seed: int
) -> None:
    chance = random.Random(seed)
    sources = [tmp_path / f"{number}.jsonl" for number in range(3)]
    contents = [prose(chance.randrange(1, 60), seed * 10 + number) for number in range(3)]
    contents[chance.randrange(3)].insert(0 if chance.random() < 0.2 else -1, BAD)
    for source, lines in zip(sources, contents, strict=True):
        source.write_bytes(b"\n".join(lines) + b"\n")
    stop_at_bad_line(sources, tmp_path / "out", small_bpe)
    for lines in contents:
        for change in chance.sample(range(5), chance.randrange(3)):
            at = chance.randrange(len(lines) + 1)
            if change == 0:
                lines.insert(at, prose(1, 99)[0])
            elif change == 1:
                del lines[at:]
            elif change == 2:
                lines.extend(prose(20, 98))
            elif change == 3 and at < len(lines):
                del lines[at]
            elif at < len(lines) and lines[at] != BAD:
                lines[at] = lines[at].replace(b'": "', b'": "' + b"x" * chance.randrange(1, 3), 1)
    for source, lines in zip(sources, contents, strict=True):
        source.write_bytes(b"".join(line + b"\n" for line in lines if line != BAD))
    make(sources, tmp_path / "out", small_bpe)
    assert_like_fresh(sources, tmp_path / "out", small_bpe)


def test_killed_while_it_looks_at_the_change_it_still_goes_on(
    tmp_path: Path, small_bpe: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    import holdfast.data.preprocess.workspace as workspace

    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(b"\n".join(lines_with_bad(200, 150)))
    stop_at_bad_line(source, out, small_bpe)
    publish = workspace.publish_bytes

    def die(path: Path, content: bytes) -> None:
        if path.name == "settings.json":
            raise KeyboardInterrupt
        publish(path, content)

    source.write_bytes(b"\n".join(prose(201, 5)))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(workspace, "publish_bytes", die)
        make(source, out, small_bpe)
    make(source, out, small_bpe)
    assert_like_fresh(source, out, small_bpe)


def test_lines_that_were_skipped_stop_a_run_that_must_not_skip_them(
    tmp_path: Path, small_bpe: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(b"\n".join(lines_with_bad(100, 3)))
    import holdfast.data.preprocess.build as building

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(building, "publish_pairs", interrupt)
        make(source, out, small_bpe, on_bad_line="skip")
    with pytest.raises(HoldfastError, match="a.jsonl:4: bad line"):
        make(source, out, small_bpe)
    assert make(source, out, small_bpe, on_bad_line="skip").bad_lines == 1
    with pytest.raises(HoldfastError, match="exists already"):
        make(source, out, small_bpe)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_finished_run_without_bad_lines_is_complete_however_they_are_treated(
    tmp_path: Path, small_bpe: TokenizerFiles
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join(prose(10)))
    make(source, tmp_path / "out", small_bpe)
    assert make(source, tmp_path / "out", small_bpe, on_bad_line="skip").already_complete


def test_a_run_that_did_nothing_does_not_stand_in_the_way(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(line.replace(b'"text"', b'"body"') + b"\n" for line in prose(3)))
    with pytest.raises(HoldfastError, match="no key 'text'"):
        make(source, tmp_path / "out", small_bpe)
    assert not (tmp_path / "out.preprocessing").exists()
    assert make(source, tmp_path / "out", small_bpe, json_keys=["body"]).documents == 3


def test_other_settings_are_still_refused(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join(lines_with_bad(200, 150)))
    stop_at_bad_line(source, tmp_path / "out", small_bpe)
    with pytest.raises(HoldfastError, match=r"other settings \(keep_newlines differ.*--overwrite"):
        make(source, tmp_path / "out", small_bpe, keep_newlines=True)
    shutil.copy(source, tmp_path / "b.jsonl")
    with pytest.raises(HoldfastError, match=r"other settings \(inputs differ.*--overwrite"):
        make(tmp_path / "b.jsonl", tmp_path / "out", small_bpe)


def test_an_unfinished_run_whose_files_were_cut_short_is_refused_and_starts_over_on_request(
    tmp_path: Path, small_bpe: TokenizerFiles
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(b"\n".join(lines_with_bad(200, 150)))
    stop_at_bad_line(source, out, small_bpe)
    os.truncate(tmp_path / "out.preprocessing" / "0.lengths", 4)
    with pytest.raises(
        HoldfastError, match=r"0\.lengths is shorter than the journal records; start over with --overwrite"
    ):
        make(source, out, small_bpe, on_bad_line="skip")
    assert make(source, out, small_bpe, on_bad_line="skip", overwrite=True).documents == 200
    assert_like_fresh(source, out, small_bpe, on_bad_line="skip")


def test_what_comes_from_standard_input_is_never_taken_for_what_came_before(
    tmp_path: Path, small_bpe: TokenizerFiles
) -> None:
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
    words += [*small_bpe.flags(), "--workers", "1"]

    def pipe(lines: list[bytes], *more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*words, *more], input=b"\n".join(lines), capture_output=True)

    assert pipe(lines_with_bad(2000, 1900)).returncode == 1
    assert (tmp_path / "out.preprocessing").exists()
    assert pipe(prose(20, 6)).returncode == 0
    refused = pipe(prose(30, 7))
    assert refused.returncode == 1 and b"--overwrite" in refused.stderr
    assert pipe(prose(30, 7), "--overwrite").returncode == 0
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(prose(30, 7)))
    preprocess(tmp_path / "a.jsonl", tmp_path / "fresh", **small_bpe.arguments())  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == pair(tmp_path / "fresh_text_document")


@pytest.mark.parametrize("change", ["shrink", "grow", "replace"])
def test_an_input_that_changes_while_it_is_read_ends_the_run(
    tmp_path: Path, small_bpe: TokenizerFiles, change: str
) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = prose(300, 8)
    source.write_bytes(b"\n".join(lines) + b"\n")
    words = [sys.executable, "-m", "holdfast.cli", "preprocess", "--input", str(source), "-"]
    words += ["--output-prefix", str(out), *small_bpe.flags(), "--append-eod"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stderr
        deadline = time.monotonic() + 120
        # The settings are written once the input is known; standard input keeps the run from its end.
        while not (tmp_path / "out.preprocessing" / "settings.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        if change == "shrink":
            os.truncate(source, len(b"\n".join(lines[:100])) + 1)
        elif change == "grow":
            with source.open("ab") as file:
                file.write(b"\n".join(prose(5, 9)))
        else:
            (tmp_path / "new").write_bytes(b"\n".join(lines[::-1]) + b"\n")
            (tmp_path / "new").replace(source)
        process.stdin.write('{"text": "the end"}\n')
        process.stdin.close()
        message = process.stderr.read()
    assert process.returncode == 1 and "a.jsonl has changed while it was read" in message
    assert not list(tmp_path.glob("out_text_document.*")) and not (tmp_path / "out.json").exists()


def test_what_was_read_of_an_input_before_it_changed_is_kept_if_it_is_still_true(
    tmp_path: Path, small_bpe: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    import holdfast.data.preprocess.build as building

    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = prose(200, 5)
    source.write_bytes(b"\n".join(lines) + b"\n")
    tokenize = building._tokenize

    def change_at_the_end(*arguments: object) -> tuple[int, str]:
        done = tokenize(*arguments)  # type: ignore[arg-type]
        with source.open("ab") as file:
            file.write(b"\n".join(prose(20, 6)) + b"\n")
        return done

    with monkeypatch.context() as patched, pytest.raises(HoldfastError, match="changed while it was read"):
        patched.setattr(building, "_tokenize", change_at_the_end)
        make(source, out, small_bpe)
    assert make(source, out, small_bpe).documents == 220
    assert_like_fresh(source, out, small_bpe)
