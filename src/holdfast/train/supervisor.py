"""Starts the ranks of this node with torchelastic, watches them, restarts them, and reports each failure once.

One supervisor per node. When a rank dies, the supervisor kills the others at once (their state is in the snapshots) and starts
all ranks again, up to `max_restarts` times. It does not restart after a user's mistake. A rank's output goes to its log
(`rank_log`); the supervisor shows the end of the log when the rank fails.
"""

import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from holdfast.config import Config, config_to_toml
from holdfast.system.atomic_files import publish_text
from holdfast.system.cpu_features import avoid_amx_traps, explain_sigill, reports_amx
from holdfast.system.errors import REFUSED, HoldfastError
from holdfast.system.journal import BufferedJournal
from holdfast.system.progress import count_of, log
from holdfast.train.rank_log import FOLDER_VARIABLE, last_lines, rank_log
from holdfast.train.rendezvous import endpoint_of, wait_for_nodes
from holdfast.train.run_folder.result import describe_end

MONITOR_SECONDS = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connectFullMesh failed")


def run_ranks(config: Config) -> None:
    """Runs the ranks of this node until they end; raises a HoldfastError with the first cause if they fail."""
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    folder = Path(config.train.save) if config.train.save else None
    logs = folder / "logs" if folder else Path(tempfile.mkdtemp(prefix="holdfast-logs-"))
    keep_logs = folder is not None
    try:
        _supervise(config, folder, logs)
    except HoldfastError:
        keep_logs = True
        raise
    finally:
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)
    if config.parallel.node_rank == 0:
        for line in describe_end(config):
            log(line)


def _supervise(config: Config, folder: Path | None, logs: Path) -> None:
    parallel = config.parallel
    endpoint = endpoint_of(parallel)
    store = None  # node 0 serves it as long as it is referenced
    if parallel.nnodes > 1 and endpoint:
        limit = parallel.distributed_timeout_minutes * 60
        store = wait_for_nodes(*endpoint, parallel.node_rank, parallel.nnodes, limit)
    logs.mkdir(parents=True, exist_ok=True)
    events = BufferedJournal(folder / "events.jsonl") if folder else None
    with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as work:
        resolved = Path(work) / "config.toml"
        publish_text(resolved, config_to_toml(config))
        _set_environment(config, logs)
        supervisor = Supervisor(_spec(config, resolved), work, events, logs)
        try:
            result = supervisor.run()
        except SignalException as stopped:
            where = f"; the same command continues from {folder}" if folder else "; nothing was kept (no --save)"
            log(f"stopped by {signal.Signals(stopped.sigval).name}{where}")
            sys.exit(0 if stopped.sigval in (signal.SIGTERM, signal.SIGUSR1) else 128 + stopped.sigval)
        except DistError as error:
            raise HoldfastError(f"lost the connection to the other nodes of the run: {error}") from error
    del store
    if result.is_failed():
        raise HoldfastError(supervisor.refusal or _describe_failures(supervisor.causes, logs))


def _set_environment(config: Config, logs: Path) -> None:
    """Environment variables that the ranks inherit."""
    os.environ["HOLDFAST_SUPERVISED"] = "1"
    os.environ[FOLDER_VARIABLE] = str(logs.resolve())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in SIGNALS)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // config.parallel.nproc_per_node)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if (config.train.bf16 or config.train.fp16) and reports_amx() and not torch.cuda.is_available():
        avoid_amx_traps()


def _spec(config: Config, resolved: Path) -> WorkerSpec:
    parallel = config.parallel
    static = parallel.nnodes > 1
    endpoint = parallel.rdzv_endpoint or "127.0.0.1:0"
    host, _, port = endpoint.rpartition(":")
    run_id = hashlib.blake2b((config.train.save or "").encode(), digest_size=6).hexdigest()
    options: dict[str, Any] = {"rank": parallel.node_rank, "timeout": 900} if static else {}
    parameters = RendezvousParameters(
        backend="static" if static else "c10d",
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=parallel.nnodes,
        max_nodes=parallel.nnodes,
        **options,
    )
    return WorkerSpec(
        role="holdfast",
        local_world_size=parallel.nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", "-m", "holdfast.train", str(resolved)),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=parallel.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        master_addr=host if static else None,
        master_port=int(port) if static else None,
    )


class Supervisor(LocalElasticAgent):
    """An elastic agent that reports failures as they happen and does not restart after a user's mistake."""

    def __init__(self, spec: WorkerSpec, work: str, events: BufferedJournal | None, logs: Path) -> None:
        super().__init__(
            spec=spec, logs_specs=DefaultLogsSpecs(log_dir=work), start_method="spawn", exit_barrier_timeout=30
        )
        self._events, self._logs = events, logs
        self.refusal: str | None = None
        self.causes: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A signal between two starts would lose the ranks started so far. Ranks inherit the mask and unblock the signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Ranks handle SIGTERM: during start-up it ends them without a traceback, later they stop after the same step.
        super()._shutdown(signal.SIGTERM if death_sig == signal.SIGINT else death_sig, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._record(result.failures)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # The surviving ranks hang in a collective with the dead one: waiting for them is useless.
        self._shutdown(signal.SIGKILL)

    def _record(self, failures: dict[int, ProcessFailure]) -> None:
        causes = {rank: describe_failure(failure) for rank, failure in failures.items()}
        # Times are in seconds; within one second, a rank that only lost a connection comes after the one that broke it.
        rank = min(failures, key=lambda r: (any(sign in causes[r] for sign in LOST_PEER), int(failures[r].timestamp)))
        failure, cause = failures[rank], causes[rank]
        if cause.startswith(REFUSED):
            self.refusal = cause.removeprefix(REFUSED)
            self._remaining_restarts = 0
            return
        if failure.exitcode == -signal.SIGILL:  # the same instruction would trap again
            self.refusal = f"rank {rank}: {cause}"
            self._remaining_restarts = 0
        self.causes.append(f"rank {rank}: {cause}")
        if not self.refusal:
            self._report(rank, failure, cause)
        if self._events:
            # The keeper records deaths too, with the step of each rank; only the parent knows how a process ended.
            self._events.event("failure", kind="exit", rank=rank, cause=cause, exit_code=failure.exitcode)

    def _report(self, rank: int, failure: ProcessFailure, cause: str) -> None:
        left = count_of(self._remaining_restarts, "restart")
        again = f"; starting all ranks again ({left} left)" if self._remaining_restarts > 0 else ""
        log(f"rank {rank} failed: {cause}{again}")
        seen = self.causes.count(f"rank {rank}: {cause}") > 1
        if seen or failure.exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            return
        path = rank_log(self._logs, rank)
        lines = last_lines(path)
        if lines:
            log("\n".join([f"the end of {path}:", *(f"  | {line}" for line in lines)]))


def describe_failure(failure: ProcessFailure) -> str:
    """The exception's last line, or the signal that ended the process."""
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", message)
    text = str(message).strip()
    if failure.exitcode == -signal.SIGILL:
        return explain_sigill()
    if failure.exitcode < 0 and not Path(failure.error_file).is_file():
        try:
            return f"killed by {signal.Signals(-failure.exitcode).name}"
        except ValueError:
            return f"exit code {failure.exitcode}"
    lines = [line for line in text.splitlines() if line.strip()]
    return (
        lines[-1].removeprefix("NoRestart: ").removeprefix("RuntimeError: ")
        if lines
        else f"exit code {failure.exitcode}"
    )


def _describe_failures(causes: list[str], logs: Path) -> str:
    times = [cause if number == 1 else f"{cause} ({number} times)" for cause, number in Counter(causes).items()]
    restarts = f"gave up after {count_of(len(causes) - 1, 'restart')}: " if len(causes) > 1 else ""
    return f"{restarts}{'; '.join(times)}; the ranks' output is in {logs}"
