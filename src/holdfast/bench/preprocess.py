"""`bench preprocess`: start-up and writing included, beside tokenizing libraries and Megatron's own scripts.

Every contender runs in a process of its own.
"""

import functools
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.bench.harness import (
    ProcessCost,
    Row,
    Tables,
    installed,
    median,
    median_ratio,
    refuse_unknown,
    run_process,
    run_rounds,
    show,
    timed,
)
from holdfast.bench.preprocess_peers import MEGATRON, PEERS, Megatron
from holdfast.tokenizers import read_recipe

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
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        parts = PreprocessParts(options, Path(folder), str(vocab), str(merges))
        size = options.corpus.stat().st_size / 1e6
        tables: dict[str, Callable[[], list[Row]]] = {
            f"race: {size:,.0f} MB of JSON lines to .bin/.idx, {options.workers} workers": parts.race,
            "start-up: a file of one line": parts.start_up,
            "compressed: input beside the decompressor alone and plain input": parts.compressed,
            "merge: beside copying the same files": parts.merge,
            "read: sequences of 1,024 tokens at random, one process, warm": parts.read,
        }
        if options.large_mb:
            tables["large: the same text over and over"] = parts.large
        if options.bert_vocab_file:
            bert = needed_file(options.bert_vocab_file, "--bert-vocab-file", "BertWordPieceLowerCase")
            tables["sentences: --split-sentences with a BERT vocabulary"] = lambda: parts.sentences(str(bert))
        return {title: table() for title, table in tables.items() if title.split(":")[0] in options.parts}


def _wall(cost: ProcessCost) -> float:
    return cost.wall


def _cpu(cost: ProcessCost) -> float:
    return cost.cpu


class PreprocessParts:
    """The measurements, one method each, over one corpus and one work folder."""

    def __init__(self, options: PreprocessBench, work: Path, vocab: str, merges: str) -> None:
        self.corpus, self.work = options.corpus, work
        self.workers, self.rounds, self._large_mb = options.workers, options.rounds, options.large_mb
        self._vocab, self._merges = vocab, merges
        self._megatron = Megatron(options.megatron, options.megatron_python, work) if options.megatron else None
        self._peers = installed({name: name for name in options.against}) if "race" in options.parts else []
        self._megabytes = self.corpus.stat().st_size / 1e6

    def _command(self, name: str, source: Path, prefix: str) -> list[str]:
        if name == "holdfast":
            files = ["--vocab-file", self._vocab, "--merge-file", self._merges]
            return self._holdfast(source, prefix, *files, "--append-eod")
        if name in MEGATRON:
            assert self._megatron is not None
            recipe = read_recipe("GPT2BPETokenizer", self._vocab, self._merges)
            flags = ["--workers", str(self.workers)] if name == "megatron" else ["--use-gigatoken"]
            return self._megatron.command(name, source, prefix, recipe, "--append-eod", *flags)
        module = [sys.executable, "-m", "holdfast.bench.preprocess_peers", name]
        return [*module, str(source), f"{prefix}_text_document", self._vocab, self._merges, str(self.workers)]

    def _holdfast(self, source: Path, prefix: str, *flags: str) -> list[str]:
        words = [sys.executable, "-m", "holdfast.cli", "preprocess", "--input", str(source), "--output-prefix", prefix]
        return [*words, *flags, "--workers", str(self.workers)]

    def _preprocess(
        self, source: Path, name: str = "holdfast", written: Callable[[Path], None] | None = None
    ) -> ProcessCost:
        """One run of a contender in a folder that is removed afterwards; `written` gets the folder first."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            cost = run_process(name, self._command(name, source, f"{folder}/out"))
            if written:
                written(Path(folder))
        return cost

    def race(self) -> list[Row]:
        outputs: dict[str, list[bytes]] = {}

        def turn(name: str) -> ProcessCost:
            return self._preprocess(self.corpus, name, lambda folder: outputs.update({name: _checksums(folder)}))

        names = ["holdfast", *self._peers, *(MEGATRON if self._megatron else ())]
        costs = run_rounds({name: functools.partial(turn, name) for name in names}, self.rounds)
        same = {name: "yes" if outputs[name] == outputs["holdfast"] else "NO" for name in names}
        return [{**self._row(name, costs), "same bytes": same[name]} for name in names]

    def _row(self, name: str, costs: dict[str, list[ProcessCost]]) -> Row:
        own, ours = costs[name], costs["holdfast"]
        return {
            "tool": name,
            "wall s": median(own, _wall),
            "MB/s": self._megabytes / median(own, _wall),
            "CPU s": median(own, _cpu),
            "peak MB": median(own, lambda one: one.memory) / 1e6,
            "wall × holdfast": median_ratio(own, ours, _wall),
            "CPU × holdfast": median_ratio(own, ours, _cpu),
        }

    def start_up(self) -> list[Row]:
        """What a run costs before its first token: as called, and with the fast engine, which a large input gets."""
        source = self.work / "one.jsonl"
        with self.corpus.open("rb") as file:
            source.write_bytes(file.readline())

        def turn(engine: str) -> ProcessCost:
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                command = self._command("holdfast", source, f"{folder}/out")
                return run_process(engine, [*command, "--tokenizer-engine", engine])

        turns = {engine: functools.partial(turn, engine) for engine in ("auto", "fast")}
        costs = run_rounds(turns, max(self.rounds, 5))
        return [
            {"engine": engine, "wall s": median(own, _wall), "CPU s": median(own, _cpu)}
            for engine, own in costs.items()
        ]

    def large(self) -> list[Row]:
        """Time and memory as the input grows: memory should stay, time should grow no faster than the input."""
        source = self.work / "large.jsonl"
        with source.open("wb") as target:
            for _ in range(max(1, round(self._large_mb / self._megabytes))):
                with self.corpus.open("rb") as part:
                    shutil.copyfileobj(part, target, 1 << 22)
        rows = []
        for path in (self.corpus, source):
            costs = [self._preprocess(path) for _ in range(self.rounds)]
            size = path.stat().st_size / 1e6
            slowest, fastest = size / max(map(_wall, costs)), size / min(map(_wall, costs))
            rows.append(
                {
                    "MB": round(size),
                    "wall s": median(costs, _wall),
                    "MB/s": size / median(costs, _wall),
                    "slowest to fastest MB/s": f"{slowest:.1f} to {fastest:.1f}",
                    "CPU s": median(costs, _cpu),
                    "peak MB": max(one.memory for one in costs) / 1e6,
                }
            )
        source.unlink()
        return rows

    def sentences(self, vocab: str) -> list[Row]:
        def turn(name: str) -> ProcessCost:
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                command = self._sentences_command(name, vocab, Path(folder))
                cost = run_process(name, command)
                if not Path(folder, "out_text_sentence.idx").exists():
                    # Megatron's script ends after splitting and needs a second call for the rest (its issue 1052).
                    cost += run_process(name, command)
            return cost

        names = ["holdfast", *(["megatron"] if self._megatron else ())]
        costs = run_rounds({name: functools.partial(turn, name) for name in names}, self.rounds)
        return [self._row(name, costs) for name in names]

    def _sentences_command(self, name: str, vocab: str, folder: Path) -> list[str]:
        prefix, kind = str(folder / "out"), "BertWordPieceLowerCase"
        if name == "holdfast":
            tokenizer = ("--tokenizer-type", kind, "--vocab-file", vocab)
            return self._holdfast(self.corpus, prefix, *tokenizer, "--split-sentences")
        assert self._megatron is not None
        # It writes the split text beside its input: a link keeps that in the folder that is removed.
        link = folder / "corpus.jsonl"
        link.symlink_to(self.corpus.absolute())
        flags = ("--split-sentences", "--workers", str(self.workers))
        return self._megatron.command(name, link, prefix, read_recipe(kind, vocab), *flags)

    def compressed(self) -> list[Row]:
        """Each form is decompressed by its own tool to nowhere, and preprocessed; the slower of tool and plain input limits."""
        tools = {
            "zst": ["zstd", "-q", "-3", "-T0"],
            "xz": ["xz", "-3", "-T0", "--block-size=8MiB"],
            "gz": ["gzip", "-5"],
        }
        rows = []
        plain = median([self._preprocess(self.corpus) for _ in range(self.rounds)], _wall)
        for form, tool in tools.items():
            if not shutil.which(tool[0]):
                continue
            packed = self.work / f"c.jsonl.{form}"
            with self.corpus.open("rb") as source, packed.open("wb") as target:
                subprocess.run([*tool, "-c"], stdin=source, stdout=target, check=True)
            turns: dict[str, Callable[[], ProcessCost]] = {
                "tool": functools.partial(run_process, tool[0], [tool[0], "-dc", str(packed)]),
                "holdfast": functools.partial(self._preprocess, packed),
            }
            costs = run_rounds(turns, self.rounds)
            wall, alone = median(costs["holdfast"], _wall), median(costs["tool"], _wall)
            rows.append(
                {
                    "form": form,
                    "MB/s": self._megabytes / wall,
                    "CPU s": median(costs["holdfast"], _cpu),
                    f"{tool[0]} -dc MB/s": self._megabytes / alone,
                    "plain MB/s": self._megabytes / plain,
                    "× the slower of both": max(alone, plain) / wall,
                }
            )
        return rows

    def merge(self) -> list[Row]:
        from holdfast.data.merge import merge

        folder, copies, parts = self.work / "merging", self.work / "copies", 8
        folder.mkdir()
        for number in range(parts):
            for ending in ("bin", "idx"):
                shutil.copyfile(f"{self._dataset()}.{ending}", folder / f"{number}.{ending}")
        size = sum(path.stat().st_size for path in folder.iterdir())

        def copy() -> None:
            subprocess.run(["cp", "-r", str(folder), str(copies)], check=True)
            for path in copies.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            shutil.rmtree(copies)

        turns = {
            "copy": lambda: timed(copy),
            "merge": lambda: timed(lambda: merge([folder], self.work / "merged", overwrite=True)),
        }
        seconds = run_rounds(turns, self.rounds)
        ratio = median_ratio(seconds["copy"], seconds["merge"], float)
        rate = size / 1e6 / statistics.median(seconds["merge"])
        return [{"parts": parts, "MB/s": rate, "× cp of the same files, synced": ratio}]

    def _dataset(self) -> str:
        prefix = self.work / "dataset"
        if not prefix.with_name("dataset_text_document.idx").exists():
            run_process("holdfast", self._command("holdfast", self.corpus, str(prefix)))
        return f"{prefix}_text_document"

    def read(self) -> list[Row]:
        from holdfast.data.indexed import IndexedDataset, IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(self.work / "rows", np.uint16)
        tokens = IndexedDataset(self._dataset()).tokens
        for start in range(0, len(tokens) - 1024, 1024):
            builder.add_document(tokens[start : start + 1024])
        builder.finalize()
        dataset = IndexedDataset(self.work / "rows")
        order = np.random.default_rng(0).integers(0, len(dataset), 200_000).tolist()
        row = np.empty(1024, np.uint16)

        def read() -> None:
            for number in order:
                row[:] = dataset[number]

        seconds = [timed(read) for _ in range(self.rounds + 1)][1:]
        rate = len(order) / statistics.median(seconds)
        return [{"sequences/s": rate, "GB/s": rate * 2048 / 1e9}]


def _checksums(folder: Path) -> list[bytes]:
    found = []
    for ending in ("bin", "idx"):
        with (folder / f"out_text_document.{ending}").open("rb") as file:
            found.append(hashlib.file_digest(file, "sha256").digest())
    return found
