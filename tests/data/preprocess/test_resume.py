"""Kill it any time: the next call goes on and gives the same bytes; nothing half-written ever has a final name."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from holdfast import preprocess
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import pair, prose
from tests.flockless import without_flock


def command(source: Path, prefix: Path, files: TokenizerFiles, *more: str) -> list[str]:
    words = [sys.executable, "-m", "holdfast.cli", "preprocess", "--input", str(source), "--output-prefix", str(prefix)]
    # The reference engine is slow: there is time to be killed in.
    return [*words, *files.flags(), "--workers", "2", "--append-eod", "--tokenizer-engine", "reference", *more]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "prose.jsonl"
    path.write_bytes(b"\n".join(prose(5000, seed=2)) + b"\n")
    return path


@pytest.fixture(scope="module")
def expected(source: Path, small_bpe: TokenizerFiles) -> tuple[bytes, bytes]:
    prefix = source.parent / "whole"
    preprocess(source, prefix, **small_bpe.arguments(), append_eod=True)  # type: ignore[arg-type]
    return pair(f"{prefix}_text_document")


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def wait_for(condition: object, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_instants_it_ends_with_the_same_bytes(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles, expected: tuple[bytes, bytes], times: int
) -> None:
    chance = random.Random(7)
    prefix = tmp_path / "out"
    idx = tmp_path / "out_text_document.idx"
    for _ in range(times):
        process = start(command(source, prefix, small_bpe))
        try:
            # From before the first unit to after the last; later calls must get far enough to finish.
            process.wait(chance.uniform(0.2, 2.5))
        except subprocess.TimeoutExpired:
            children = descendants(process)
            process.kill()
            wait_gone(children)
        process.wait()
        if idx.exists():
            # It was done: the pair is whole. Once more from the beginning, for the kills that are left.
            assert pair(tmp_path / "out_text_document") == expected
            for file in tmp_path.iterdir():
                if file.is_file():
                    file.unlink()
    done = subprocess.run(command(source, prefix, small_bpe), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert pair(tmp_path / "out_text_document") == expected
    assert not list(tmp_path.glob("*.preprocessing"))


def test_what_is_done_is_not_done_again(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles, expected: tuple[bytes, bytes]
) -> None:
    journal = tmp_path / "out.preprocessing/journal.jsonl"
    process = start(command(source, tmp_path / "out", small_bpe))
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b'"next_unit"') >= 4, process)
    process.kill()
    process.wait()
    done_before = journal.read_bytes().count(b'"next_unit"')
    done = subprocess.run(command(source, tmp_path / "out", small_bpe), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continuing after" in done.stderr
    assert done_before >= 4
    assert pair(tmp_path / "out_text_document") == expected


def test_a_killed_run_that_writes_into_the_folder_of_its_input_goes_on(
    tmp_path: Path, small_bpe: TokenizerFiles, expected: tuple[bytes, bytes], source: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(source.read_bytes())
    words = command(tmp_path / "in", tmp_path / "in/out", small_bpe)
    process = start(words)
    wait_for(lambda: has_state(tmp_path / "in/out.preprocessing/journal.jsonl"), process)
    workers = descendants(process)
    process.kill()
    process.wait()
    wait_gone(workers)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continuing after" in done.stderr
    assert pair(tmp_path / "in/out_text_document") == expected


def has_state(journal: Path) -> bool:
    return journal.exists() and b'"state"' in journal.read_bytes()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_control_c_and_sigterm_end_it_with_its_workers_and_no_final_name(
    tmp_path: Path,
    source: Path,
    small_bpe: TokenizerFiles,
    expected: tuple[bytes, bytes],
    number: int,
    status: int,
) -> None:
    process = start(command(source, tmp_path / "out", small_bpe))
    wait_for(lambda: (tmp_path / "out.preprocessing/0.bin").exists() and len(descendants(process)) >= 2, process)
    children = descendants(process)
    process.send_signal(number)
    assert process.wait(60) == status
    wait_gone(children)
    assert not list(tmp_path.glob("out_text*"))
    preprocess(source, tmp_path / "out", **small_bpe.arguments(), append_eod=True)  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == expected


def test_nothing_is_left_of_a_call_that_was_wrong(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "preprocess",
        "--inputt",
        "a",
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, "WRONG_CALL": str(tmp_path)}) as process:
        process.communicate(timeout=60)
    assert process.returncode == 2
    deadline = time.monotonic() + 30
    while left := [one for one in psutil.process_iter() if environment(one).get("WRONG_CALL") == str(tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_tokenizer_that_cannot_be_built_is_named(tmp_path: Path, source: Path, engine: str) -> None:
    model = tmp_path / "tokenizer.json"
    model.write_text('{"model": {"type": "Nonsense", "vocab": {"a": 0, "<|endoftext|>": 1}}, "added_tokens": []}')
    words = [sys.executable, "-m", "holdfast.cli", "preprocess", "--input", str(source), "--output-prefix"]
    words += [str(tmp_path / "out"), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    done = subprocess.run([*words, "--tokenizer-engine", engine], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "do not make a tokenizer" in done.stderr and "Traceback" not in done.stderr


def test_a_killed_worker_is_reported_and_the_next_call_goes_on(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles, expected: tuple[bytes, bytes]
) -> None:
    words = command(source, tmp_path / "out", small_bpe)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 2, process)  # type: ignore[arg-type]
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(children[-1].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a worker was killed by signal 9; most likely memory ran out" in errors
    assert "Traceback" not in errors
    wait_gone(children)
    preprocess(source, tmp_path / "out", **small_bpe.arguments(), append_eod=True)  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == expected


def test_a_second_run_to_the_same_prefix_is_refused(tmp_path: Path, source: Path, small_bpe: TokenizerFiles) -> None:
    process = start(command(source, tmp_path / "out", small_bpe))
    try:
        wait_for(lambda: (tmp_path / "out.preprocessing/settings.json").exists(), process)
        with pytest.raises(HoldfastError, match="another process is preprocessing to this prefix"):
            preprocess(source, tmp_path / "out", **small_bpe.arguments(), append_eod=True)  # type: ignore[arg-type]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("last", [".json", ".bin", ".idx"])
def test_killed_while_names_are_given_it_is_completed_and_no_record_is_untrue(
    tmp_path: Path, small_bpe: TokenizerFiles, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Also where an older dataset is replaced, whose record is there."""
    older, source, out = tmp_path / "older.jsonl", tmp_path / "a.jsonl", tmp_path / "out"
    older.write_bytes(b"\n".join(prose(7, 1)))
    source.write_bytes(b"\n".join(prose(100)))
    preprocess(source, tmp_path / "whole", **small_bpe.arguments())  # type: ignore[arg-type]
    preprocess(older, out, **small_bpe.arguments())  # type: ignore[arg-type]
    import holdfast.data.indexed as indexed
    import holdfast.system.atomic_files as publish

    rename = publish.rename_into_place

    def die(temporary: Path, final: Path) -> None:
        if final.parent == tmp_path and final.suffix == last:
            raise KeyboardInterrupt
        rename(temporary, final)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(indexed, "rename_into_place", die)
        patched.setattr(publish, "rename_into_place", die)
        preprocess(source, out, **small_bpe.arguments(), overwrite=True)  # type: ignore[arg-type]
    assert not (tmp_path / "out.json").exists()
    assert (tmp_path / "out_text_document.idx").exists() == (last == ".json")
    assert not preprocess(source, out, **small_bpe.arguments()).already_complete  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == pair(tmp_path / "whole_text_document")
    assert preprocess(source, out, **small_bpe.arguments()).already_complete  # type: ignore[arg-type]


def test_where_flock_does_not_work_one_run_at_a_time_is_kept_all_the_same(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles, expected: tuple[bytes, bytes]
) -> None:
    environment, words = without_flock(tmp_path, errno.ENOSYS), command(source, tmp_path / "out", small_bpe)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        wait_for(lambda: (tmp_path / "out.preprocessing/0.bin").exists(), process)
        second = subprocess.run(words, capture_output=True, text=True, env=environment)
    finally:
        process.kill()
        process.wait()
    assert second.returncode == 1
    assert f"process {process.pid} on " in second.stderr and "is preprocessing to this prefix" in second.stderr
    fast = [word.replace("reference", "auto") for word in words]
    done = subprocess.run(fast, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert pair(tmp_path / "out_text_document") == expected


FULL_DISK = """
mount -t tmpfs -o size={size} tmpfs "$1" || exit 77
shift
"$@"
code=$?
[ $code = 1 ] || exit 99
ls -A {folder} > {listing}
mount -o remount,size=64m {folder} || exit 98
"$@" || exit 97
cp {folder}/out_text_document.* {results}
"""


def test_a_full_disk_is_named_and_what_is_done_stays_done(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles, expected: tuple[bytes, bytes]
) -> None:
    folder, results = tmp_path / "small", tmp_path / "results"
    folder.mkdir()
    results.mkdir()
    room = len(expected[0]) // 2
    script = FULL_DISK.format(size=room, folder=folder, listing=tmp_path / "listing", results=results)
    words = command(source, folder / "out", small_bpe)
    # A mount of one's own: as root, or in a user namespace.
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run([*unshare, "sh", "-c", script, "sh", str(folder), *words], capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        limited_file_size(tmp_path, source, small_bpe, room)
        return
    assert done.returncode == 0, done.stderr
    assert "no room left on the disk" in done.stderr
    assert "Traceback" not in done.stderr
    assert "continuing after" in done.stderr
    assert (tmp_path / "listing").read_text().split() == ["out.preprocessing"]
    assert pair(results / "out_text_document") == expected


def limited_file_size(tmp_path: Path, source: Path, files: TokenizerFiles, room: int) -> None:
    """Where nothing can be mounted: a limit on the size of a file, which fails the same writes."""
    words = ["sh", "-c", f'ulimit -f {room // 512}; exec "$@"', "sh", *command(source, tmp_path / "out", files)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out_text*"))


def test_too_little_room_is_seen_before_the_work_starts(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = tmp_path / "sparse.jsonl"
    with source.open("wb") as file:
        # A sparse file of a size that no disk has: only its size is looked at.
        file.truncate(1 << 43)
    with pytest.raises(HoldfastError, match="GB free, and this input needs about"):
        preprocess(source, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert not list(tmp_path.glob("out*"))
