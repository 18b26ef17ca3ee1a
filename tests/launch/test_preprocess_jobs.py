"""Preprocessing on several nodes: byte for byte what one machine makes, also when tasks die."""

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import Lab, free_ports, is_free

PARTITIONS = 4

# Sends Ctrl-C to `launch status --watch` after its first line; ends with its exit code.
INTERRUPTED_WATCH = """
import signal, subprocess, sys
command = [sys.executable, "-m", "holdfast.cli", "launch", "status", sys.argv[1], "--watch"]
process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
first = process.stdout.readline()
process.send_signal(signal.SIGINT)
sys.stdout.write(first + process.stdout.read())
sys.exit(process.wait())
"""


def write_corpus(path: Path, documents: int) -> Path:
    words = random.Random(7).sample([f"w{number}" for number in range(5000)], 800)
    pick = random.Random(8)
    with path.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(pick.choices(words, k=pick.randrange(5, 80)))}) + "\n")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str | Path]]:
    """A corpus, and the flags of its tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    corpus = write_corpus(folder / "corpus.jsonl", documents=3000)
    run_holdfast("tokenizer", "train", "--input", corpus, "--vocab-size", "400", "--output-dir", folder)
    tokenizer = ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt", "--append-eod"]
    return corpus, [*tokenizer, "--workers", "1"]


@pytest.fixture(scope="module")
def expected(text: tuple[Path, list[str | Path]]) -> dict[str, bytes]:
    """What one machine makes."""
    corpus, flags = text
    prefix = corpus.with_name("one")
    run_holdfast("preprocess", "--input", corpus, "--output-prefix", prefix, *flags)
    return dataset(prefix)


def run_holdfast(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "holdfast.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def dataset(prefix: Path) -> dict[str, bytes]:
    return {
        suffix: prefix.with_name(f"{prefix.name}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")
    }


@pytest.mark.slurm
def test_an_array_over_four_nodes_with_a_task_killed_equals_one_machine(
    lab: Lab, shared: Path, text: tuple[Path, list[str | Path]], expected: dict[str, bytes]
) -> None:
    corpus, flags = text
    prefix = shared / "corpus"
    arguments = [
        "preprocess",
        "--input",
        corpus,
        "--output-prefix",
        prefix,
        *flags,
        "--nodes",
        str(PARTITIONS),
        "--exclusive",
    ]
    array, merge = lab.holdfast("launch", "slurm", *arguments).stdout.split()
    lab.wait("a running task", lambda: "RUNNING" in lab.states(f"{array}_1") or "COMPLETED" in lab.states(f"{array}_1"))
    lab.run("scontrol", "requeue", f"{array}_1")
    outputs = prefix.with_name("corpus.run") / "launch"
    lab.wait_for_end(merge, log=outputs / f"slurm-{merge}.out")
    assert dataset(prefix) == expected
    assert lab.field(f"{array}_1", "Restarts") == "1"
    uninterrupted = [task for task in range(PARTITIONS) if task != 1]
    assert len({lab.field(f"{array}_{task}", "BatchHost") for task in uninterrupted}) == len(uninterrupted)

    status = json.loads(lab.holdfast("launch", "status", f"{prefix}.run", "--json").stdout)
    watched = lab.run(sys.executable, "-c", INTERRUPTED_WATCH, f"{prefix}.run")
    assert watched.stdout == lab.holdfast("launch", "status", f"{prefix}.run").stdout
    assert [job["state"] for job in status["jobs"]] == [f"{PARTITIONS} COMPLETED", "COMPLETED"]

    # a partition is lost, and the jobs run again: only that one is made again
    for suffix in (".bin", ".idx"):
        prefix.with_name(f"corpus_text_document{suffix}").unlink()
        prefix.with_name(f"corpus_2_text_document{suffix}").unlink()
    kept = prefix.with_name("corpus_0_text_document.bin")
    before = kept.stat().st_mtime_ns
    merge = lab.holdfast("launch", "resume", f"{prefix}.run").stdout.split()[1]
    lab.wait_for_end(merge, log=outputs / f"slurm-{merge}.out")
    assert dataset(prefix) == expected
    assert kept.stat().st_mtime_ns == before


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (["--input", "/nowhere.jsonl"], 1, "/nowhere.jsonl does not exist"),
        (["--input", "-"], 2, "cannot read standard input"),
        (["--partition-index", "3"], 2, "a launch makes all partitions"),
        (["--partition", "gpu"], 1, "(there are: main, short)"),
        (["--appendeod"], 2, "--appendeod"),
    ],
)
def test_what_cannot_work_is_refused(
    lab: Lab, shared: Path, text: tuple[Path, list[str | Path]], flags: list[str], code: int, reason: str
) -> None:
    corpus, tokenizer = text
    inputs = [] if "--input" in flags else ["--input", corpus]
    arguments = ["preprocess", *inputs, *tokenizer, "--output-prefix", shared / "corpus", *flags, "--nodes", "2"]
    refused = lab.holdfast("launch", "slurm", *arguments, check=False)
    assert (refused.returncode, reason in " ".join(refused.stderr.replace("│", " ").split())) == (code, True), (
        refused.stderr
    )
    assert list(shared.iterdir()) == []


@pytest.fixture
def dask_scheduler(tmp_path: Path) -> Iterator[str]:
    """A scheduler and two workers, as processes of their own."""
    port = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    dask = [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-dashboard",
    ]
    worker = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        address,
        "--nthreads",
        "1",
        "--no-dashboard",
        "--no-nanny",
    ]
    log = (tmp_path / "dask.log").open("w")
    processes = [subprocess.Popen(dask, stdout=log, stderr=log, cwd=tmp_path)]
    try:
        end = time.monotonic() + 120
        while is_free(port):
            assert time.monotonic() < end and processes[0].poll() is None, (tmp_path / "dask.log").read_text()
            time.sleep(0.1)
        processes += [subprocess.Popen(worker, stdout=log, stderr=log, cwd=tmp_path) for _ in range(2)]
        yield address
    finally:
        for process in processes:  # asked politely, a worker whose scheduler leaves with it may wait for it for ever
            process.kill()
            process.wait()
        log.close()


def test_dask_workers_make_the_same_bytes(
    dask_scheduler: str, tmp_path: Path, text: tuple[Path, list[str | Path]], expected: dict[str, bytes]
) -> None:
    corpus, flags = text
    prefix = tmp_path / "corpus"
    arguments = [
        "--scheduler",
        dask_scheduler,
        "--partitions",
        "3",
        "--input",
        corpus,
        "--output-prefix",
        prefix,
        *flags,
    ]
    printed = run_holdfast("launch", "dask", "preprocess", *arguments)
    assert str(prefix) in printed
    assert dataset(prefix) == expected
    whole = tmp_path / "whole" / "corpus"
    at_once = ["--scheduler", dask_scheduler, "--nodes", "1", "--input", corpus, "--output-prefix", whole, *flags]
    run_holdfast("launch", "dask", "preprocess", *at_once)
    assert dataset(whole) == expected


def test_a_scheduler_that_is_not_there_is_named(tmp_path: Path, text: tuple[Path, list[str | Path]]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    corpus, flags = text
    command = [
        "launch",
        "dask",
        "preprocess",
        "--scheduler",
        address,
        "--input",
        corpus,
        "--output-prefix",
        tmp_path / "x",
        *flags,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, f"no Dask scheduler answers at {address}" in done.stderr) == (1, True), done.stderr
