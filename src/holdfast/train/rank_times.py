"""How long each rank computes per step: rank_times.jsonl and the table of slow ranks in the log.

Ranks wait for each other in collectives, so that their steps all take the same time. Here a rank's time is that of its main
thread: running, or ready to run while other processes have the CPU; a thread that waits for a collective is neither. Waits that
the rank causes itself (data, its own snapshot) count too. One small gather per logged iteration brings the times to rank 0.
On a GPU the host's thread says nothing about the device: nothing is measured there.
"""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.parallel.mesh import Grid
from holdfast.system.journal import BufferedJournal
from holdfast.system.progress import log

# A rank is slow if it computes this share and this many milliseconds longer than the median. Less is noise on a CPU.
SLOW_SHARE, SLOW_MS = 0.25, 10.0
SHOWN_RANKS = 8
# Single steps vary: the table compares the logged intervals of at least this time.
TABLE_SECONDS = 60.0


class ComputeClock:
    """The nanoseconds that the calling thread has computed. Use it from one thread."""

    def __init__(self) -> None:
        self._own_waits = 0
        self._schedule: FileIO | None = None
        with suppress(OSError):  # a kernel without it: the time in which the thread was ready to run does not count
            self._schedule = FileIO("/proc/thread-self/schedstat")

    def read(self) -> int:
        """Nanoseconds since some moment in the past."""
        ready = int(os.pread(self._schedule.fileno(), 100, 0).split()[1]) if self._schedule else 0
        return time.thread_time_ns() + ready + self._own_waits

    @contextmanager
    def own_waits(self) -> Iterator[None]:
        """Counts the whole time of the block, waits included."""
        began, computed = time.perf_counter_ns(), self.read()
        yield
        self._own_waits += max(0, time.perf_counter_ns() - began - (self.read() - computed))


class RankTimes:
    """The compute times of all ranks. Does nothing with one rank and on a GPU. The first step of a start does not count."""

    def __init__(self, folder: Path | None, grid: Grid, ranks_per_node: int) -> None:
        self.clock = ComputeClock()
        self._measured = grid.layout.world > 1 and grid.device.type == "cpu"
        self._rank, self._world, self._ranks_per_node = grid.rank, grid.layout.world, ranks_per_node
        first = self._measured and self._rank == 0
        self._journal = BufferedJournal(folder / "rank_times.jsonl") if first and folder else None
        self._since: int | None = None
        self._steps, self._mean_ms = 0, 0.0
        self._compared = [0.0] * self._world
        self._compared_steps, self._compared_since = 0, time.monotonic()

    def step_done(self) -> None:
        """Call it once per step, before an evaluation: what comes after the last call of an interval is not part of it."""
        if self._since is None:
            self.restart()
            return
        self._steps += 1
        self._mean_ms = (self.clock.read() - self._since) / self._steps / 1e6

    def restart(self) -> None:
        """Begins a new interval."""
        self._since, self._steps = self.clock.read(), 0

    def report(self, iteration: int) -> None:
        """Records the interval that ends with the iteration. Collective: all ranks call it after the same steps."""
        if not self._measured or not self._steps:
            return
        steps, own = self._steps, torch.tensor([self._mean_ms], dtype=torch.float64)
        everyone = [torch.zeros_like(own) for _ in range(self._world)] if self._rank == 0 else None
        dist.gather(own, everyone, dst=0)
        if everyone is not None:
            compute_ms = [round(float(value), 3) for value in everyone]
            if self._journal:
                record = {"time": round(time.time(), 3), "iteration": iteration, "steps": steps}
                self._journal.write({**record, "compute_ms": compute_ms})
            self._compare(compute_ms, iteration, steps)
        self.restart()

    def _compare(self, compute_ms: Sequence[float], iteration: int, steps: int) -> None:
        """Adds an interval to those that the next table compares, and logs the table when it is due."""
        self._compared = [total + ms * steps for total, ms in zip(self._compared, compute_ms, strict=True)]
        self._compared_steps += steps
        if time.monotonic() - self._compared_since < TABLE_SECONDS:
            return
        means = [total / self._compared_steps for total in self._compared]
        if table := slow_ranks_table(means, iteration - self._compared_steps + 1, iteration, self._ranks_per_node):
            log(table)
        self._compared = [0.0] * self._world
        self._compared_steps, self._compared_since = 0, time.monotonic()

    def close(self) -> None:
        if self._journal:
            self._journal.close()


def slow_ranks_table(compute_ms: Sequence[float], first: int, last: int, ranks_per_node: int) -> str:
    """The ranks that compute much longer than the median, the slowest first; empty if there are none."""
    median = statistics.median_low(compute_ms)
    limit = median + max(SLOW_SHARE * median, SLOW_MS)
    slow = sorted((rank for rank, ms in enumerate(compute_ms) if ms > limit), key=lambda rank: -compute_ms[rank])
    if not slow:
        return ""
    lines = [
        f"slow ranks in iterations {first} to {last} "
        f"(median of {len(compute_ms)} ranks: {median:.1f} ms of compute per step)"
    ]
    for rank in slow[:SHOWN_RANKS]:
        over = compute_ms[rank] - median
        share = f" (+{over / median:.0%})" if median > 0 else ""
        place = f"rank {rank} on node {rank // ranks_per_node}"
        lines.append(f"  {place:<24} {compute_ms[rank]:>10.1f} ms  +{over:.1f} ms{share}")
    if len(slow) > SHOWN_RANKS:
        lines.append(f"  and {len(slow) - SHOWN_RANKS} more")
    return "\n".join(lines)
