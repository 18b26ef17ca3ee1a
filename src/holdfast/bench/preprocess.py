"""How preprocessing compares, start-up and writing included: beside tokenizing libraries and Megatron's own scripts.

Every contestant runs in a process of its own and they take turns within a round, so that whatever else the machine does hits
them alike. Ratios are taken within a round; medians are reported, with CPU seconds, which suffer less from a busy machine.
"""

import importlib.util
import json
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

from holdfast.bench.command import Tables, refuse_unknown, show
from holdfast.bench.preprocess_peers import PEERS
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import Recipe, read_recipe

MEGATRON = {"megatron": "preprocess_data.py", "megatron-fast": "preprocess_data_fast.py"}


@dataclass
class Measured:
    wall: float
    cpu: float
    memory: int

    def __add__(self, later: "Measured") -> "Measured":
        return Measured(self.wall + later.wall, self.cpu + later.cpu, max(self.memory, later.memory))


PARTS = ("race", "start-up", "large", "sentences", "compressed", "merge", "read")


@dataclass(frozen=True, kw_only=True)
class PreprocessBench:
    """Measure preprocessing beside what people tokenize corpora with.

    Examples:

      holdfast bench preprocess --corpus corpus.jsonl \\
          --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt
    """

    corpus: Path
    """JSON lines with the key "text"."""
    vocab_file: str = "gpt2"
    """GPT-2's vocab.json, or the catalog name gpt2."""
    merge_file: str | None = None
    """GPT-2's merges.txt. Unset: from the catalog, with --vocab-file gpt2."""
    bert_vocab_file: str | None = None
    """BERT's vocab.txt, to measure --split-sentences with it."""
    against: tuple[str, ...] = tuple(PEERS)
    """Peers. Those that are not installed are left out."""
    megatron: str | None = None
    """A checkout of Megatron-LM, whose own scripts are then measured too."""
    megatron_python: str = sys.executable
    """Interpreter for Megatron's scripts (they need triton, nltk and Python 3.12)."""
    parts: tuple[str, ...] = PARTS
    """What to measure."""
    large_mb: int = 0
    """Size in MB of the input of "large", the corpus over and over; 0 leaves it out."""
    workers: int = 2
    """Worker processes or threads of every contender."""
    rounds: int = 3
    """How often each is measured."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: PreprocessBench) -> None:
    show("preprocess", run(options), options.json)


def run(options: PreprocessBench) -> Tables:
    from holdfast.tokenizers.recipe import needed_file

    refuse_unknown(options.against, PEERS)
    refuse_unknown(options.parts, PARTS, "part")
    vocab = needed_file(options.vocab_file, "--vocab-file", "GPT2BPETokenizer")
    merges = needed_file(options.merge_file or options.vocab_file, "--merge-file", "GPT2BPETokenizer")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as work:
        checkout = Megatron(options.megatron, options.megatron_python, Path(work)) if options.megatron else None
        bench = Bench(options.corpus, Path(work), str(vocab), str(merges), checkout, options.workers, options.rounds)
        peers = [peer for peer in options.against if importlib.util.find_spec(peer)]
        size = bench.corpus.stat().st_size / 1e6
        tables: dict[str, Callable[[], list[dict[str, Any]]]] = {
            f"race: {size:,.0f} MB of JSON lines to .bin/.idx, {options.workers} workers": lambda: bench.race(peers),
            "start-up: a file of one line": bench.start_up,
            "compressed: input beside the decompressor alone and plain input": bench.compressed,
            "merge: beside copying the same files": bench.merging,
            "read: sequences of 1,024 tokens at random, one process, warm": bench.reading,
        }
        if options.large_mb:
            tables["large: the same text over and over"] = lambda: bench.large(options.large_mb)
        if options.bert_vocab_file:
            bert = needed_file(options.bert_vocab_file, "--bert-vocab-file", "BertWordPieceLowerCase")
            tables["sentences: --split-sentences with a BERT vocabulary"] = lambda: bench.sentences(str(bert))
        return {title: table() for title, table in tables.items() if title.split(":")[0] in options.parts}


class Megatron:
    """A checkout of Megatron-LM. Its tokenizers come from a hub unless they are given as a folder, which is written here."""

    def __init__(self, checkout: str, python: str, work: Path) -> None:
        self._checkout, self._python, self._work = checkout, python, work

    def command(self, script: str, source: Path, prefix: str, recipe: Recipe, *flags: str) -> list[str]:
        folder = self._work / f"tokenizer-{recipe.digest[:8]}"
        if not folder.exists():
            folder.mkdir()
            (folder / "tokenizer.json").write_text(recipe.definition)
            names = (
                {"eos_token": "<|endoftext|>"} if recipe.cls is None else {"unk_token": "[UNK]", "sep_token": "[SEP]"}
            )
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        offline = ["env", f"PYTHONPATH={self._checkout}", "HF_HUB_OFFLINE=1"]
        words = [*offline, self._python, f"{self._checkout}/tools/{script}", "--input", str(source)]
        words += [
            "--output-prefix",
            prefix,
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(folder),
        ]
        return [*words, *flags]


class Bench:
    def __init__(
        self, corpus: Path, work: Path, vocab: str, merges: str, megatron: Megatron | None, workers: int, rounds: int
    ) -> None:
        self.corpus, self.work, self.workers, self.rounds = corpus, work, workers, rounds
        self.vocab, self.merges, self.megatron = vocab, merges, megatron
        self._recipe = read_recipe("GPT2BPETokenizer", vocab, merges)

    def command(self, name: str, source: Path, prefix: str) -> list[str]:
        if name == "holdfast":
            files = ["--vocab-file", self.vocab, "--merge-file", self.merges]
            return self._holdfast(source, prefix, *files, "--append-eod")
        if name in MEGATRON:
            assert self.megatron is not None
            flags = ["--workers", str(self.workers)] if name == "megatron" else ["--use-gigatoken"]
            return self.megatron.command(MEGATRON[name], source, prefix, self._recipe, "--append-eod", *flags)
        module = [sys.executable, "-m", "holdfast.bench.preprocess_peers", name]
        return [*module, str(source), f"{prefix}_text_document", self.vocab, self.merges, str(self.workers)]

    def _holdfast(self, source: Path, prefix: str, *flags: str) -> list[str]:
        words = [sys.executable, "-m", "holdfast.cli", "preprocess", "--input", str(source), "--output-prefix", prefix]
        return [*words, *flags, "--workers", str(self.workers)]

    def race(self, peers: Sequence[str]) -> list[dict[str, Any]]:
        names = ["holdfast", *peers, *(MEGATRON if self.megatron else ())]
        results: dict[str, list[Measured]] = {name: [] for name in names}
        reference: tuple[bytes, bytes] | None = None
        same: dict[str, str] = {}
        for _ in range(self.rounds):
            for name in names:
                folder = self.work / "race"
                folder.mkdir()
                measured = measure(self.command(name, self.corpus, str(folder / "out")))
                results[name].append(measured)
                files = [folder / f"out_text_document.{ending}" for ending in ("bin", "idx")]
                written = (digest(files[0]), digest(files[1]))
                reference = reference or written
                same[name] = "yes" if written == reference else "NO"
                shutil.rmtree(folder)
        return [self._row(name, results[name], results["holdfast"], **{"same bytes": same[name]}) for name in names]

    def _row(self, name: str, measured: list[Measured], ours: list[Measured], **more: str) -> dict[str, Any]:
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
            **more,
        }

    def start_up(self) -> list[dict[str, Any]]:
        """What a run costs before its first token: as called, and with the fast engine, which a large input gets."""
        source = self.work / "one.jsonl"
        with self.corpus.open("rb") as file:
            source.write_bytes(file.readline())
        engines = ("auto", "fast")
        measured: dict[str, list[Measured]] = {engine: [] for engine in engines}
        for number in range(max(self.rounds, 5)):
            for engine in engines:
                command = self.command("holdfast", source, str(self.work / f"{engine}{number}"))
                measured[engine].append(measure([*command, "--tokenizer-engine", engine]))
        return [
            {
                "engine": engine,
                "wall s": statistics.median(one.wall for one in runs),
                "CPU s": statistics.median(one.cpu for one in runs),
            }
            for engine, runs in measured.items()
        ]

    def large(self, megabytes: int) -> list[dict[str, Any]]:
        """Time and memory as the input grows: memory should not, time no faster than the input."""
        source = self.work / "large.jsonl"
        times = max(1, round(megabytes * 1e6 / self.corpus.stat().st_size))
        with source.open("wb") as target:
            for _ in range(times):
                with self.corpus.open("rb") as part:
                    shutil.copyfileobj(part, target, 1 << 22)
        rows = []
        for path in (self.corpus, source):
            measured = [self._preprocess(path) for _ in range(self.rounds)]
            size = path.stat().st_size / 1e6
            rows.append(
                {
                    "MB": round(size),
                    "wall s": statistics.median(one.wall for one in measured),
                    "MB/s": statistics.median(size / one.wall for one in measured),
                    "slowest to fastest MB/s": " to ".join(
                        f"{size / one.wall:.1f}"
                        for one in sorted(measured, key=lambda m: -m.wall)[:: max(1, len(measured) - 1)]
                    ),
                    "CPU s": statistics.median(one.cpu for one in measured),
                    "peak MB": max(one.memory for one in measured) / 1e6,
                }
            )
        source.unlink()
        return rows

    def sentences(self, vocab: str) -> list[dict[str, Any]]:
        recipe = read_recipe("BertWordPieceLowerCase", vocab)
        results: dict[str, list[Measured]] = {"holdfast": [], **({"megatron": []} if self.megatron else {})}
        for _ in range(self.rounds):
            for name, measured in results.items():
                folder = self.work / "sentences"
                folder.mkdir()
                prefix = str(folder / "out")
                flags = ("--split-sentences",)
                if name == "holdfast":
                    tokenizer = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab)
                    command = self._holdfast(self.corpus, prefix, *tokenizer, *flags)
                else:
                    assert self.megatron is not None
                    # Its split text lies beside the input: a link keeps that in the folder that is removed.
                    link = folder / "corpus.jsonl"
                    link.symlink_to(self.corpus.absolute())
                    more = ("--workers", str(self.workers))
                    command = self.megatron.command(MEGATRON[name], link, prefix, recipe, *flags, *more)
                measured.append(measure(command))
                if not Path(f"{prefix}_text_sentence.idx").exists():
                    # Megatron's script ends after splitting and wants a second call for the rest (its issue 1052).
                    measured[-1] = measured[-1] + measure(command)
                shutil.rmtree(folder)
        return [self._row(name, measured, results["holdfast"]) for name, measured in results.items()]

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
    os.sync()  # what the one before it has left to be written is not its affair
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, resident_bytes(process.pid))

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


def resident_bytes(process: int) -> int:
    """Of a process and all that it started; one that has gone meanwhile holds nothing."""
    folder = Path("/proc", str(process))
    try:
        own = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [
            int(word) for task in (folder / "task").iterdir() for word in (task / "children").read_text().split()
        ]
    except (OSError, IndexError):
        return 0
    return own + sum(resident_bytes(child) for child in children)


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def digest(path: Path) -> bytes:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
