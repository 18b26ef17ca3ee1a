"""The stages of the demo: each runs the real verb on real files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.demo.corpus import collect_standard_library
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import read_journal
from holdfast.system.progress import log, progress

RANKS = 2


@dataclass(frozen=True)
class Scale:
    """How much the demo reads and trains."""

    duration: str
    disk: str
    """Both as the user reads them before the demo begins; docs/performance.md has the measurements."""
    text_bytes: int
    vocabulary: int
    steps: int
    kill_at: int
    evaluate_every: int
    training: Mapping[str, int]
    """Flags of `holdfast train` that differ between the scales."""


FULL = Scale(
    "1 to 3 minutes", "about 60 MB", text_bytes=1 << 40, vocabulary=4096, steps=260, kill_at=150, evaluate_every=26,
    training={"num-layers": 3, "hidden-size": 128, "seq-length": 96, "micro-batch-size": 8, "global-batch-size": 16},
)  # fmt: skip
FAST = Scale(
    "20 to 60 seconds", "about 40 MB", text_bytes=3_000_000, vocabulary=2048, steps=80, kill_at=40, evaluate_every=20,
    training={"num-layers": 2, "hidden-size": 128, "seq-length": 64, "micro-batch-size": 8, "global-batch-size": 16},
)  # fmt: skip
TRAINING = {
    "num-attention-heads": 4, "split": "90,10,0", "optimizer": "muon", "lr": 1e-2, "min-lr": 1e-3, "lr-warmup-iters": 10,
    "weight-decay": 0.1, "adam-beta2": 0.95, "eval-iters": 4, "nproc-per-node": RANKS, "log-interval": 1,
}  # fmt: skip


@dataclass(frozen=True)
class DemoRun:
    """The result of one training run of the demo."""

    folder: Path
    seconds: float
    first_loss: float
    last_loss: float
    resumed: dict[str, Any] | None
    killed_at: int | None


def prepare(work: Path, scale: Scale) -> tuple[Path, Path, dict[str, Any]]:
    """Makes text, tokenizer and dataset; returns the tokenizer's folder, the dataset's prefix and the counts."""
    from holdfast.data.preprocess.run import preprocess
    from holdfast.data.sources.texts import Texts
    from holdfast.tokenizers.training import train_tokenizer

    corpus, tokenizer = work / "corpus.jsonl", work / "tokenizer"
    files, size = collect_standard_library(corpus, scale.text_bytes)
    log(f"1. Text: {files:,} files of the Python standard library on this machine, {size / 1e6:.1f} MB.")
    start = time.perf_counter()
    train_tokenizer(Texts([corpus]), tokenizer, scale.vocabulary)
    log(f"2. Tokenizer: {scale.vocabulary:,} tokens, trained on that text in {time.perf_counter() - start:.1f} s.")
    start = time.perf_counter()
    summary = preprocess(
        [corpus],
        work / "stdlib",
        vocab_file=tokenizer / "vocab.json",
        merge_file=tokenizer / "merges.txt",
        append_eod=True,
        overwrite=True,
    )
    log(
        f"3. Dataset: {summary.tokens:,} tokens in Megatron's .bin/.idx format, in {time.perf_counter() - start:.1f} s."
    )
    return tokenizer, work / "stdlib_text_document", {"documents": files, "bytes": size, "tokens": summary.tokens}


def train(work: Path, name: str, tokenizer: Path, prefix: Path, scale: Scale, kill_at: int | None) -> DemoRun:
    """Trains with two ranks through the real command, and kills one of them with SIGKILL at step `kill_at`."""
    folder = work / name
    command = [sys.executable, "-m", "holdfast.cli", "train", *_flags(scale), "--data-path", str(prefix)]
    command += ["--vocab-file", str(tokenizer / "vocab.json"), "--merge-file", str(tokenizer / "merges.txt")]
    command += ["--save", str(folder)]
    start, killed, shown = time.perf_counter(), None, 0
    log_file = (work / f"{name}.log").open("wb")
    with (
        log_file,
        subprocess.Popen(command, stderr=log_file, stdout=log_file) as process,
        progress(f"   {name}", scale.steps, "steps") as bar,
    ):
        try:
            while process.poll() is None:
                records = list(read_journal(folder / "metrics.jsonl"))
                step = records[-1]["iteration"] if records else 0
                bar.advance(max(0, step - shown))
                shown = max(shown, step)
                if records:
                    bar.note(f"loss {records[-1]['loss']:.3f}")
                if kill_at is not None and killed is None and step >= kill_at:
                    killed = kill_rank(folder, step)
                time.sleep(0.05)
        except BaseException:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode:
        raise HoldfastError(f"training ended with exit code {process.returncode}; see {work / f'{name}.log'}")
    return _result(folder, time.perf_counter() - start, killed)


def _flags(scale: Scale) -> list[str]:
    length = {"train-iters": scale.steps, "eval-interval": scale.evaluate_every}
    return [
        word for key, value in {**TRAINING, **scale.training, **length}.items() for word in (f"--{key}", str(value))
    ]


def kill_rank(folder: Path, step: int) -> int:
    """Kills a rank of a run with SIGKILL, as an out-of-memory killer does; returns the step."""
    from holdfast.snapshot.memory.run_memory import RunMemory

    pages = RunMemory.of(folder.resolve().name, folder).pages()
    try:
        process = pages[max(pages)]["process"]
        os.kill(process, signal.SIGKILL)
    except (ValueError, ProcessLookupError):
        raise HoldfastError(
            f"training ended before a rank could be killed at step {step}; run the demo again"
        ) from None
    log(f"   Step {step}: killed rank process {process} with kill -9; it could save nothing.")
    return step


def _result(folder: Path, seconds: float, killed: int | None) -> DemoRun:
    records = read_journal(folder / "metrics.jsonl")
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    resumed = [event for event in read_journal(folder / "events.jsonl") if event["event"] == "resumed"]
    return DemoRun(folder, seconds, losses[0], losses[-1], resumed[-1] if resumed else None, killed)


def same_weights(left: Path, right: Path) -> bool:
    """Whether two runs ended with the same weights and optimizer state, bit for bit."""
    from holdfast.checkpoint import open_checkpoint

    with open_checkpoint(left) as one, open_checkpoint(right) as other:
        if set(one.tensors) != set(other.tensors):
            return False
        return all(one.tensor(name).tobytes() == other.tensor(name).tobytes() for name in one.tensors)
