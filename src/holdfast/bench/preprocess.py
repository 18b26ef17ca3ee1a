"""How preprocessing compares, start-up and writing included: beside tokenizing libraries and Megatron's own scripts.

Every contestant runs in a process of its own and they take turns within a round, so that whatever else the machine does hits
them alike. Ratios are taken within a round; medians are reported, with CPU seconds, which suffer less from a busy machine.
"""

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.bench.preprocess_peers import PEERS
from holdfast.errors import HoldfastError, UsageError

MEGATRON = ("megatron", "megatron-fast")


@dataclass
class Measured:
    wall: float
    cpu: float
    memory: int


def run(
    *,
    corpus: str,
    vocab_file: str = "gpt2",
    merge_file: str | None = None,
    against: tuple[str, ...] = tuple(PEERS),
    megatron: str | None = None,
    workers: int = 2,
    rounds: int = 3,
) -> dict[str, list[dict[str, Any]]]:
    """Preprocessing, beside what people tokenize corpora with.

    For example:

    $ holdfast bench preprocess --corpus corpus.jsonl --vocab-file vocab.json --merge-file merges.txt

    Args:
        corpus: JSON lines with the key "text".
        vocab_file: GPT-2's vocab.json, or the catalog name gpt2.
        merge_file: GPT-2's merges.txt.
        against: Peers: tiktoken, tokenizers, gigatoken. Those that are not installed are left out.
        megatron: A checkout of Megatron-LM, whose own scripts then take part.
        workers: Worker processes or threads of every contestant.
        rounds: How often each is measured.
    """
    from holdfast.tokenizers.recipe import needed_file

    unknown = [peer for peer in against if peer not in PEERS]
    if unknown:
        raise UsageError(f"there is no peer {', '.join(unknown)}; there are: {', '.join(PEERS)}")
    vocab = needed_file(vocab_file, "--vocab-file", "GPT2BPETokenizer")
    merges = needed_file(merge_file or vocab_file, "--merge-file", "GPT2BPETokenizer")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as work:
        bench = Bench(Path(corpus), Path(work), str(vocab), str(merges), workers, rounds)
        peers = [peer for peer in against if importlib.util.find_spec(peer)]
        size = bench.corpus.stat().st_size / 1e6
        return {
            f"{size:,.0f} MB of JSON lines to .bin/.idx, {workers} workers": bench.race(peers, megatron),
            "start-up: a file of one line": bench.start_up(),
            "compressed input, beside the decompressor alone and plain input": bench.compressed(),
            "merge, beside copying the same files": bench.merging(),
            "reading sequences of 1,024 tokens at random, one process, warm": bench.reading(),
        }


class Bench:
    def __init__(self, corpus: Path, work: Path, vocab: str, merges: str, workers: int, rounds: int) -> None:
        self.corpus, self.work, self.workers, self.rounds = corpus, work, workers, rounds
        self.vocab, self.merges = vocab, merges

    def command(self, name: str, source: Path, prefix: str, megatron: str | None = None) -> list[str]:
        files = ["--vocab-file", self.vocab, "--merge-file", self.merges]
        if name == "holdfast":
            words = [
                sys.executable,
                "-m",
                "holdfast.cli",
                "preprocess",
                "--input",
                str(source),
                "--output-prefix",
                prefix,
            ]
            return [*words, *files, "--append-eod", "--workers", str(self.workers)]
        if name in MEGATRON:
            script = {"megatron": "preprocess_data.py", "megatron-fast": "preprocess_data_fast.py"}[name]
            words = [
                sys.executable,
                f"{megatron}/tools/{script}",
                "--input",
                str(source),
                "--output-prefix",
                prefix,
                *files,
            ]
            words += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
            return words + (["--workers", str(self.workers)] if name == "megatron" else ["--use-gigatoken"])
        module = [sys.executable, "-m", "holdfast.bench.preprocess_peers", name]
        return [*module, str(source), f"{prefix}_text_document", self.vocab, self.merges, str(self.workers)]

    def race(self, peers: Sequence[str], megatron: str | None) -> list[dict[str, Any]]:
        names = ["holdfast", *peers, *(MEGATRON if megatron else ())]
        results: dict[str, list[Measured]] = {name: [] for name in names}
        reference: tuple[bytes, bytes] | None = None
        same: dict[str, str] = {}
        for _ in range(self.rounds):
            for name in names:
                folder = self.work / "race"
                folder.mkdir()
                measured = measure(self.command(name, self.corpus, str(folder / "out"), megatron))
                results[name].append(measured)
                files = [folder / f"out_text_document.{ending}" for ending in ("bin", "idx")]
                written = (digest(files[0]), digest(files[1]))
                reference = reference or written
                same[name] = "yes" if written == reference else "NO"
                shutil.rmtree(folder)
        return [self._row(name, results[name], results["holdfast"], same[name]) for name in names]

    def _row(self, name: str, measured: list[Measured], ours: list[Measured], same: str) -> dict[str, Any]:
        size = self.corpus.stat().st_size / 1e6
        ratios = [theirs.wall / mine.wall for theirs, mine in zip(measured, ours, strict=True)]
        cpu_ratios = [theirs.cpu / mine.cpu for theirs, mine in zip(measured, ours, strict=True)]
        return {
            "tool": name,
            "wall s": statistics.median(one.wall for one in measured),
            "MB/s": statistics.median(size / one.wall for one in measured),
            "CPU s": statistics.median(one.cpu for one in measured),
            "peak MB": statistics.median(one.memory for one in measured) / 1e6,
            "wall × holdfast": statistics.median(ratios),
            "CPU × holdfast": statistics.median(cpu_ratios),
            "same bytes": same,
        }

    def start_up(self) -> list[dict[str, Any]]:
        source = self.work / "one.jsonl"
        with self.corpus.open("rb") as file:
            source.write_bytes(file.readline())
        measured = []
        for number in range(max(self.rounds, 5)):
            measured.append(measure(self.command("holdfast", source, str(self.work / f"one{number}"))))
        return [
            {"wall s": statistics.median(m.wall for m in measured), "CPU s": statistics.median(m.cpu for m in measured)}
        ]

    def compressed(self) -> list[dict[str, Any]]:
        """Each form is read by its own tool to nowhere, and preprocessed; the limit is the slower of tool and plain input."""
        tools = {
            "zst": ["zstd", "-q", "-3", "-T0"],
            "xz": ["xz", "-3", "-T0", "--block-size=8MiB"],
            "gz": ["gzip", "-5"],
        }
        available = {name: tool for name, tool in tools.items() if shutil.which(tool[0])}
        for name, tool in available.items():
            with self.corpus.open("rb") as source, (self.work / f"c.jsonl.{name}").open("wb") as target:
                subprocess.run([*tool, "-c"], stdin=source, stdout=target, check=True)
        rows = []
        size = self.corpus.stat().st_size / 1e6
        plain = [self._preprocess(self.corpus) for _ in range(self.rounds)]
        for name, tool in available.items():
            packed = self.work / f"c.jsonl.{name}"
            ours, alone = [], []
            for _ in range(self.rounds):
                alone.append(measure([tool[0], "-dc", str(packed)]))
                ours.append(self._preprocess(packed))
            limit = max(statistics.median(m.wall for m in alone), statistics.median(m.wall for m in plain))
            wall = statistics.median(m.wall for m in ours)
            rows.append(
                {
                    "form": name,
                    "MB/s": size / wall,
                    "CPU s": statistics.median(m.cpu for m in ours),
                    f"{tool[0]} -dc MB/s": size / statistics.median(m.wall for m in alone),
                    "plain MB/s": size / statistics.median(m.wall for m in plain),
                    "× the slower of both": limit / wall,
                }
            )
        return rows

    def _preprocess(self, source: Path) -> Measured:
        folder = self.work / "form"
        folder.mkdir()
        measured = measure(self.command("holdfast", source, str(folder / "out")))
        shutil.rmtree(folder)
        return measured

    def merging(self) -> list[dict[str, Any]]:
        from holdfast.data.merge import merge

        part = self._dataset()
        folder = self.work / "merging"
        folder.mkdir()
        parts = 8
        for number in range(parts):
            for ending in ("bin", "idx"):
                shutil.copyfile(f"{part}.{ending}", folder / f"{number}.{ending}")
        ratios, rates = [], []
        size = sum(path.stat().st_size for path in folder.iterdir())
        for _ in range(self.rounds):
            copying = timed(lambda: self._copy_all(folder))
            merging = timed(lambda: merge([folder], self.work / "merged", overwrite=True))
            ratios.append(copying / merging)
            rates.append(size / 1e6 / merging)
        return [
            {
                "parts": parts,
                "MB/s": statistics.median(rates),
                "× cp of the same files, synced": statistics.median(ratios),
            }
        ]

    def _copy_all(self, folder: Path) -> None:
        target = self.work / "copies"
        subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
        for path in target.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target)

    def _dataset(self) -> str:
        prefix = self.work / "dataset"
        if not prefix.with_name("dataset_text_document.idx").exists():
            subprocess.run(self.command("holdfast", self.corpus, str(prefix)), check=True, capture_output=True)
        return f"{prefix}_text_document"

    def reading(self) -> list[dict[str, Any]]:
        from holdfast.data.indexed import IndexedDataset, IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(self.work / "rows", np.uint16)
        tokens = IndexedDataset(self._dataset()).tokens
        for start in range(0, len(tokens) - 1024, 1024):
            builder.add_document(tokens[start : start + 1024])
        builder.finalize()
        dataset = IndexedDataset(self.work / "rows")
        order = np.random.default_rng(0).integers(0, len(dataset), 200_000).tolist()
        row = np.empty(1024, np.uint16)
        rates = []
        for _ in range(self.rounds + 1):

            def read() -> None:
                for number in order:
                    row[:] = dataset[number]

            rates.append(len(order) / timed(read))
        return [{"sequences/s": statistics.median(rates[1:]), "GB/s": statistics.median(rates[1:]) * 2048 / 1e9}]


def measure(command: Sequence[str]) -> Measured:
    """Wall time, CPU time and peak memory (summed over the processes) of a command and all that it starts."""
    import psutil

    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    watched, peak, done = psutil.Process(process.pid), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            try:
                family = [watched, *watched.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in family))
            except psutil.Error:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - started
    done.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise HoldfastError(f"{' '.join(command[:4])} ... failed: {errors.decode(errors='replace')[-500:]}")
    return Measured(wall, usage.ru_utime + usage.ru_stime, peak)


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def digest(path: Path) -> bytes:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
