"""The stages of the demo: each runs the real verb on real files."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.demo.corpus import collect_standard_library
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import read_journal
from holdfast.system.progress import log, progress

VOCABULARY = 4096
STEPS = 260
EVALUATE_EVERY = 26
KILL_AT = 150
TRAINING = {
    "num-layers": 3, "hidden-size": 128, "num-attention-heads": 4, "seq-length": 96, "split": "90,10,0",
    "train-iters": STEPS, "micro-batch-size": 8, "global-batch-size": 16, "lr": 3e-3, "min-lr": 3e-4,
    "lr-warmup-iters": 10, "weight-decay": 0.1, "adam-beta2": 0.95, "eval-interval": EVALUATE_EVERY, "eval-iters": 4,
    "nproc-per-node": 2, "log-interval": 1,
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


def prepare(work: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Makes text, tokenizer and dataset; returns the tokenizer's folder, the dataset's prefix and the counts."""
    from holdfast.data.preprocess.run import preprocess
    from holdfast.data.sources.texts import Texts
    from holdfast.tokenizers.training import train_tokenizer

    corpus, tokenizer = work / "corpus.jsonl", work / "tokenizer"
    files, size = collect_standard_library(corpus)
    log(f"1. text         {files:,} files of the Python standard library, {size / 1e6:.1f} MB")
    start = time.perf_counter()
    train_tokenizer(Texts([corpus]), tokenizer, VOCABULARY)
    log(f"2. tokenizer    {VOCABULARY:,} tokens trained in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    summary = preprocess(
        [corpus],
        work / "stdlib",
        vocab_file=tokenizer / "vocab.json",
        merge_file=tokenizer / "merges.txt",
        append_eod=True,
        overwrite=True,
    )
    seconds = time.perf_counter() - start
    log(f"3. dataset      {summary.tokens:,} tokens in {seconds:.1f} s, {size / 1e6 / seconds:.0f} MB/s")
    return tokenizer, work / "stdlib_text_document", {"documents": files, "bytes": size, "tokens": summary.tokens}


def train(work: Path, name: str, tokenizer: Path, prefix: Path, kill_at: int | None) -> DemoRun:
    """Trains with two ranks through the real command, and kills one of them with SIGKILL at step `kill_at`."""
    folder = work / name
    flags = [word for key, value in TRAINING.items() for word in (f"--{key}", str(value))]
    files = ["--vocab-file", str(tokenizer / "vocab.json"), "--merge-file", str(tokenizer / "merges.txt")]
    command = [sys.executable, "-m", "holdfast.cli", "train", *flags, *files]
    command += ["--data-path", str(prefix), "--save", str(folder)]
    start, killed, shown = time.perf_counter(), None, 0
    log_file = (work / f"{name}.log").open("wb")
    with (
        log_file,
        subprocess.Popen(command, stderr=log_file, stdout=log_file) as process,
        progress(name, STEPS, "steps") as bar,
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
                    killed = kill_rank(process.pid, step)
                time.sleep(0.05)
        except BaseException:
            process.terminate()
            process.wait(60)
            raise
    if process.returncode:
        raise HoldfastError(f"training ended with exit code {process.returncode}; see {work / f'{name}.log'}")
    return _result(folder, time.perf_counter() - start, killed)


def kill_rank(supervisor: int, step: int) -> int:
    """Kills a rank of a supervisor with SIGKILL, as an out-of-memory killer does; returns the step."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    ranks = [int(child) for child in children if b"holdfast.train" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(max(ranks), signal.SIGKILL)
    log(f"                killed rank process {max(ranks)} with SIGKILL at step {step}")
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
