"""Metrics of the run: the iteration line, metrics.jsonl, TensorBoard, trackers. Only rank 0 reports.

Log files get the iteration line in Megatron's format, terminals one of at most 80 columns.
"""

import contextlib
import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.models.flops import peak_flops
from holdfast.system.journal import BufferedJournal
from holdfast.system.progress import clock_time, log, short_number
from holdfast.train.trackers.process import start_trackers

COLUMNS = 80


@dataclass
class Iteration:
    """The numbers of one finished step."""

    iteration: int
    lr: float
    batch_size: int
    consumed_samples: int
    consumed_tokens: int
    sums: Tensor
    """[gradient norm, the model's terms...]"""
    snapshot_stall_ms: float
    loss_scale: float | None
    ended: float
    """When the numbers were on the host, in seconds of time.perf_counter()."""
    extra: dict[str, float] = field(default_factory=dict)


class Reporter:
    """Writes iterations to log, metrics.jsonl and TensorBoard. Does nothing on ranks other than 0."""

    def __init__(
        self,
        folder: Path | None,
        *,
        active: bool,
        iterations: int,
        log_interval: int,
        terms: Sequence[str],
        flops_per_token: int,
        tokens_per_sample: int,
        world: int,
        device: torch.device,
        tensorboard: bool,
        trackers: bool = False,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self._constants = constants or {}
        self._active, self._iterations, self._interval, self._terms = active, iterations, log_interval, terms
        self._flops, self._tokens, self._world = flops_per_token, tokens_per_sample, world
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak, self._device = peak_flops(name), device
        self._journal = BufferedJournal(folder / "metrics.jsonl") if active and folder else None
        self._board: Any = None
        if active and folder and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))
        self._trackers = start_trackers(folder) if active and folder and trackers else None
        self._since, self._steps, self._samples = time.perf_counter(), 0, 0
        self.first_step_seconds: float | None = None
        self._first: Iteration | None = None

    def restart_clock(self) -> None:
        """Excludes the time since the last report (an evaluation) from the step time."""
        self._since, self._steps, self._samples = time.perf_counter(), 0, 0

    def is_due(self, done: Iteration) -> bool:
        """Whether the iteration is logged; the same on all ranks."""
        return done.iteration % self._interval == 0 or done.iteration == self._iterations or bool(done.extra)

    def report(self, done: Iteration, skipped: int) -> None:
        """Reports a finished step. Call it once per iteration, in order."""
        self._steps += 1
        self._samples += done.batch_size
        if not self._active:
            return
        norm, terms = float(done.sums[0]), name_terms(self._terms, done.sums[1:])
        loss = terms.pop("loss")
        if self.first_step_seconds is None:
            self.first_step_seconds = done.ended - self._since
            self._first = done
            log(f"first step took {self.first_step_seconds:.2f} s (with kernel start-up and compilation)")
        if not (math.isfinite(loss) and math.isfinite(norm)):
            first = done.consumed_samples - done.batch_size
            log(
                f"warning: iteration {done.iteration}: loss {loss}, gradient norm {norm}; step skipped; "
                f"the batch was samples {first} to {done.consumed_samples - 1}"
            )
        if not self.is_due(done):
            return
        elapsed = done.ended - self._since
        per_second = self._samples * self._tokens / elapsed
        tflops = per_second * self._flops / self._world / 1e12
        record = {
            "time": round(time.time(), 3),
            "iteration": done.iteration,
            "loss": loss,
            **terms,
            "lr": done.lr,
            "grad_norm": norm,
            "step_ms": elapsed / self._steps * 1e3,
            "tokens_per_s": per_second,
            "sequences_per_s": per_second / self._tokens,
            "tflops": tflops,
            "mfu": tflops * 1e12 / self._peak if self._peak else None,
            "snapshot_stall_ms": done.snapshot_stall_ms,
            "consumed_samples": done.consumed_samples,
            "consumed_tokens": done.consumed_tokens,
            "skipped_iterations": skipped,
            "memory_bytes": peak_memory(self._device),
            **({"loss_scale": done.loss_scale} if done.loss_scale is not None else {}),
            **self._constants,
            **done.extra,
            **({"evaluation_ms": (time.perf_counter() - done.ended) * 1e3} if done.extra else {}),
        }
        self._publish(record, done, list(terms))
        self._since, self._steps, self._samples = done.ended, 0, 0

    def _seconds_left(self, done: Iteration) -> float | None:
        """Estimated from the steps since the first of this start, evaluations and saves included."""
        if self._first is None or done.iteration == self._first.iteration:
            return None
        pace = (done.ended - self._first.ended) / (done.iteration - self._first.iteration)
        return pace * (self._iterations - done.iteration)

    def _publish(self, record: dict[str, Any], done: Iteration, terms: list[str]) -> None:
        log(
            iteration_line(record, done.batch_size, self._iterations, terms),
            short=terminal_line(record, self._iterations, self._seconds_left(done)),
        )
        if self._journal:
            self._journal.write(record)
        try:
            self._write_scalars(record)
        except OSError as error:
            self._board = None
            log(f"warning: cannot write TensorBoard event files: {error}; this run writes no more of them")

    def _write_scalars(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if self._board and isinstance(value, int | float) and key not in ("iteration", "time"):
                self._board.add_scalar(key, value, record["iteration"])

    def close(self) -> None:
        if self._journal:
            self._journal.close()
        if self._board:
            with contextlib.suppress(OSError):  # a full disk
                self._board.close()
        if self._trackers:
            self._trackers.close()


def peak_memory(device: torch.device) -> int:
    """The most bytes that rank 0 has used so far: of its GPU as torch allocated them, or resident ones of its process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def name_terms(names: Sequence[str], values: Tensor) -> dict[str, float]:
    """`loss`, the sum of the terms that are losses, and then every term by name."""
    terms = dict(zip(names, values.tolist(), strict=True))
    return {"loss": sum(value for name, value in terms.items() if name.endswith("loss")), **terms}


def iteration_line(record: dict[str, Any], batch_size: int, iterations: int, terms: Sequence[str]) -> str:
    """The iteration in Megatron's format."""
    mfu = "unknown" if record["mfu"] is None else f"{record['mfu'] * 100:.1f}%"
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {record['iteration']:8d}/{iterations:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['step_ms']:.1f}",
        f"learning rate: {record['lr']:.6E}",
        f"global batch size: {batch_size:5d}",
        f"{'total' if terms else 'lm'} loss: {record['loss']:.6E}",
        *(f"{name.replace('_', ' ')}: {record[name]:.6E}" for name in terms),
    ]
    if "loss_scale" in record:
        parts.append(f"loss scale: {record['loss_scale']:.1f}")
    parts += [
        f"grad norm: {record['grad_norm']:.3f}",
        f"tokens/s: {record['tokens_per_s']:,.0f}",
        f"sequences/s: {record['sequences_per_s']:,.1f}",
        f"TFLOP/s per rank: {record['tflops']:.2f}",
        f"MFU: {mfu}",
        f"skipped iterations: {record['skipped_iterations']:3d}",
    ]
    if "validation_loss" in record:
        parts.append(f"validation loss: {record['validation_loss']:.6E} | PPL: {record['validation_perplexity']:.3f}")
    return " | ".join(parts) + " |"


def terminal_line(record: dict[str, Any], iterations: int, seconds_left: float | None) -> str:
    """The iteration in at most 80 columns, and a second line for an evaluation."""
    parts = {
        "step": f"step {record['iteration']:>{len(str(iterations))}}/{iterations}",
        "loss": f"loss {_digits(record['loss'])}",
        "lr": f"lr {record['lr']:.2e}",
        "norm": f"grad {_digits(record['grad_norm'], 2)}",
        "rate": f"{short_number(record['tokens_per_s']):>6} tok/s",
        "left": "" if seconds_left is None else f"ETA {clock_time(seconds_left)}",
    }
    room = COLUMNS if parts["left"] else COLUMNS - len("  ETA 0:00:00")  # the next lines have the same columns
    for dropped in ("", "norm", "lr"):
        parts.pop(dropped, None)
        line = "  ".join(filter(None, parts.values()))
        if len(line) <= room:
            break
    if "validation_loss" in record:
        line += (
            f"\n  validation loss {record['validation_loss']:.4f}, perplexity {record['validation_perplexity']:,.2f}"
        )
    return line


def _digits(value: float, decimals: int = 4) -> str:
    return f"{value:.{decimals}f}" if abs(value) < 100 else f"{value:.6g}"
