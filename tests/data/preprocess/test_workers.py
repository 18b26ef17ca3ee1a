"""The worker pool: workers start from nothing, end with their pool, and the cause of a worker's death is reported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.data.preprocess.workers import WorkerPool
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import pair, prose


def test_a_worker_killed_before_it_is_ready_is_reported_with_the_signal(tmp_path: Path) -> None:
    with WorkerPool(2) as pool:
        os.kill(pool.process.pid, signal.SIGKILL)
        with pytest.raises(HoldfastError, match="a worker was killed by signal 9; most likely memory ran out"):
            list(pool.results(iter(()), tmp_path))


def test_a_worker_that_fails_to_start_is_reported_with_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.data.preprocess.workers.START", [sys.executable, "-c", "raise SystemExit(7)"])
    with WorkerPool(1) as pool, pytest.raises(HoldfastError, match="a worker ended with exit status 7"):
        list(pool.results(iter(()), tmp_path))


def test_no_process_is_left_when_a_pool_is_closed() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with WorkerPool(3) as pool:
        assert pool.workers == 3
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(prose(50)))
    return path


def test_a_script_without_a_main_guard_may_call_preprocess(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"from holdfast import preprocess\n"
        f"print(preprocess({str(source)!r}, 'out', vocab_file={str(small_bpe.vocab_file)!r}, "
        f"merge_file={str(small_bpe.merge_file)!r}, workers=2).documents)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "50\n"


def test_workers_import_nothing_from_the_working_directory(
    tmp_path: Path, source: Path, small_bpe: TokenizerFiles
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("numpy", "orjson", "holdfast", "socket"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    words = [sys.executable, "-P", "-m", "holdfast.cli", "preprocess", "--input", str(source), "--workers", "1"]
    done = subprocess.run(
        [*words, "--output-prefix", "out", *small_bpe.flags()], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert all(pair(folder / "out_text_document"))
