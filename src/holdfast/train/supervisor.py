"""Starts the ranks of this node with torchelastic, watches them, restarts them, and reports each failure once.

One supervisor per node. When a rank dies, the supervisor kills the others at once (their state is in the snapshots) and starts
all ranks again, up to `max_restarts` times: forked from a process that has imported everything (`fork_server`), with
`standby` in the spare processes that it keeps ready. It does not restart after a user's mistake. A rank's output goes to its log
(`rank_log`); the supervisor shows its end when the rank fails.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from holdfast.config import Config, config_to_toml
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.snapshot.ranks.status_page import Phase
from holdfast.system.atomic_files import publish_text
from holdfast.system.cpu_features import avoid_amx_traps, explain_sigill, reports_amx
from holdfast.system.errors import REFUSED, HoldfastError
from holdfast.system.journal import BufferedJournal
from holdfast.system.processes import PROCESS_KEY, names_dead_process, process_key
from holdfast.system.progress import count_of, log
from holdfast.train.flight_records import FOLDER as FLIGHT
from holdfast.train.flight_records import describe_records, ranks_text, record_environment, remove_if_empty
from holdfast.train.forked_ranks import ForkServer
from holdfast.train.last_save import wait_for_last_save
from holdfast.train.rank_log import FOLDER_VARIABLE, last_lines, rank_log
from holdfast.train.rank_processes import LOST_PEER, RankProcesses, rank_environments
from holdfast.train.rendezvous import LOCAL_HOST, endpoint_of, serve_one_node, wait_for_nodes
from holdfast.train.run_folder.result import describe_end
from holdfast.train.signals import SIGNALS, raise_on_signals, signals_held
from holdfast.train.standby import Spares
from holdfast.train.timeline import now_text

WORK_PREFIX = "holdfast-ranks-"
WORK_FOLDER = re.compile(rf"{WORK_PREFIX}{PROCESS_KEY}-.+")
MONITOR_SECONDS = 0.1


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
    host, port = endpoint_of(parallel) or (LOCAL_HOST, 0)
    # Node 0 serves the store as long as it is referenced.
    if parallel.nnodes > 1:
        limit = parallel.distributed_timeout_minutes * 60
        store = wait_for_nodes(host, port, parallel.node_rank, parallel.nnodes, limit)
    else:
        store = serve_one_node(port)
        host, port = LOCAL_HOST, store.port
    logs.mkdir(parents=True, exist_ok=True)
    events = BufferedJournal(folder / "events.jsonl") if folder else None
    _remove_left_folders()
    with tempfile.TemporaryDirectory(prefix=f"{WORK_PREFIX}{process_key()}-") as work:
        resolved = Path(work) / "config.toml"
        _set_environment(config, logs)
        spares = None
        if config.parallel.standby:
            command = (sys.executable, "-u", "-m", "holdfast.train.spare", str(resolved))
            spares = Spares(command, config.parallel.nproc_per_node, logs)
        fork_server = None
        if config.parallel.fork_server and config.parallel.max_restarts > 0:
            fork_server = ForkServer((sys.executable, "-u", "-m", "holdfast.train.fork_server", str(resolved)), logs)
        progress = RankProgress(folder, config.snapshot.snapshot_dir) if folder else None
        spec = _spec(config, resolved, host, port)
        supervisor = Supervisor(config, spec, resolved, events, logs, progress, spares, fork_server)
        try:
            raise_on_signals()
            result = supervisor.run()
            if not result.is_failed():
                supervisor.wait_for_last_save()
        except SignalException as stopped:
            with contextlib.suppress(SignalException, OSError):  # a second signal ends the wait
                supervisor.wait_for_last_save()
            where = f"; the same command continues from {folder}" if folder else "; nothing was kept (no --save)"
            log(f"stopped by {signal.Signals(stopped.sigval).name}{where}")
            sys.exit(0 if stopped.sigval in (signal.SIGTERM, signal.SIGUSR1) else 128 + stopped.sigval)
        except DistError as error:
            raise HoldfastError(f"lost the connection to the other nodes of the run: {error}") from error
    del store
    if result.is_failed():
        raise HoldfastError(supervisor.refusal or _describe_failures(supervisor.causes, logs))


def _remove_left_folders() -> None:
    """Removes the folders of this user's supervisors of this machine that were killed. Other machines may share the folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{WORK_PREFIX}*"):
        match = WORK_FOLDER.fullmatch(folder.name)
        with contextlib.suppress(OSError):
            if match and names_dead_process(match) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _set_environment(config: Config, logs: Path) -> None:
    """Environment variables that the ranks inherit."""
    os.environ["HOLDFAST_SUPERVISED"] = "1"
    os.environ[FOLDER_VARIABLE] = str(logs.resolve())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in SIGNALS)
    _keep_compiled_code()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // config.parallel.nproc_per_node)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if (config.train.bf16 or config.train.fp16) and reports_amx() and not torch.cuda.is_available():
        avoid_amx_traps()


def _keep_compiled_code() -> None:
    """Has torch.compile, Triton and FlashAttention 4 keep their code in the user's cache folder: /tmp is emptied between jobs,
    and is not private.

    Not in $HOLDFAST_CACHE, which several users may share: what is kept there is executed."""
    folder = Path(platformdirs.user_cache_dir("holdfast", appauthor=False)) / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return  # torch's own folders
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash-attention"))


def _spec(config: Config, resolved: Path, host: str, port: int) -> WorkerSpec:
    parallel = config.parallel
    run_id = hashlib.blake2b((config.train.save or "").encode(), digest_size=6).hexdigest()
    # "c10d", for nodes that come and go, takes half a second for a restart: it inspects its own stack, and sleeps at random.
    parameters = RendezvousParameters(
        backend="static",
        endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        run_id=run_id,
        min_nodes=parallel.nnodes,
        max_nodes=parallel.nnodes,
        rank=parallel.node_rank,
        timeout=900,
    )
    return WorkerSpec(
        role="holdfast",
        local_world_size=parallel.nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", "-m", "holdfast.train", str(resolved)),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=parallel.max_restarts,
        monitor_interval=0.001,  # `_monitor_workers` waits
        master_addr=host,
        master_port=port,
    )


class Supervisor(LocalElasticAgent):
    """An elastic agent that reports failures as they happen and does not restart after a user's mistake."""

    _spares: Spares | None = None
    _fork_server: ForkServer | None = None
    _records: Path | None = None
    """Folder for the flight records of this start."""

    def __init__(
        self,
        config: Config,
        spec: WorkerSpec,
        resolved: Path,
        events: BufferedJournal | None,
        logs: Path,
        progress: "RankProgress | None",
        spares: Spares | None,
        fork_server: ForkServer | None,
    ) -> None:
        super().__init__(
            spec=spec,
            logs_specs=DefaultLogsSpecs(log_dir=str(resolved.parent)),
            start_method="spawn",
            exit_barrier_timeout=30,
        )
        self._config, self._resolved = config, resolved
        self._events, self._logs, self._progress = events, logs, progress
        self._spares, self._fork_server = spares, fork_server
        self.refusal: str | None = None
        self.causes: list[str] = []
        self._failed_at: str | None = None
        self._run = events.path.parent if events else None

    def _invoke_run(self, *role: str) -> RunResult:
        if self._fork_server:  # it imports while the nodes meet
            with signals_held():
                self._fork_server.start()
        return super()._invoke_run(*role)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._fork_server:
            self._fork_server.wait_until_ready()
        with signals_held():
            spec, restart = worker_group.spec, worker_group.spec.max_restarts - self._remaining_restarts
            environments = rank_environments(worker_group, restart, self._failed_at)
            self._keep_records(environments, restart)
            if not self._resolved.exists():  # also after /tmp was cleaned up during the run
                publish_text(self._resolved, config_to_toml(self._config))
            command = (str(spec.entrypoint), *spec.args)
            self._pcontext = RankProcesses(command, environments, self._logs_specs, self._spares, self._fork_server)
            self._pcontext.start()
            pids = self._pcontext.pids()
            if self._progress:
                self._progress.watch(set(pids.values()))
            return pids

    def _keep_records(self, environments: dict[int, dict[str, str]], restart: int) -> None:
        """Has torch write flight records of this start into the run folder."""
        if self._run is None:
            return
        if self._records is not None:
            remove_if_empty(self._records)
        self._records = self._run / FLIGHT / f"{int(time.time())}-{restart}"
        variables = record_environment(self._records)
        for environment in environments.values():
            environment.update(variables)

    def _describe_records(self) -> dict[str, Any]:
        if self._run is None or self._records is None:
            return {}
        here = [worker.global_rank for worker in self._worker_group.workers]
        return describe_records(self._records, self._run, here)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **options: Any) -> None:
        # Ranks handle SIGTERM: during start-up it ends them without a traceback, later they stop after the same step.
        # `more` is a timeout in newer versions of torch, nothing in 2.11.
        for helper in (self._spares, self._fork_server):
            if helper:
                helper.close()
        kept = death_sig in (signal.SIGUSR1, signal.SIGKILL)  # ranks handle no other signal of a terminal
        super()._shutdown(death_sig if kept else signal.SIGTERM, *more, **options)
        if self._records is not None:
            remove_if_empty(self._records)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, RankProcesses)
        self._pcontext.wait_for_end(MONITOR_SECONDS)
        if self._made_a_step():
            self._failed_at = None
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and self._made_a_step():
            for helper in (self._spares, self._fork_server):
                if helper:
                    with signals_held():
                        helper.keep()
        if result.state == WorkerState.FAILED:
            self._failed_at = self._failed_at or now_text()
            self._record(result.failures)
            if self._fork_server and self._pcontext.forked and not self._made_a_step():
                log("no rank is forked from now on: the ones that failed had completed no step")
                self._fork_server.close()
                self._fork_server = None
        return result

    def wait_for_last_save(self) -> None:
        if self._progress:
            wait_for_last_save(self._progress.memory)

    def _made_a_step(self) -> bool:
        return self._progress is not None and self._progress.made_a_step()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # They may hang in a collective with a rank that another node lost: waiting for them is useless.
        super()._shutdown(signal.SIGKILL)

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
        records = self._describe_records()
        if records.get("missing_ranks"):
            cause += f"; {records['collective']} waited for {ranks_text(records['missing_ranks'])}"
        self.causes.append(f"rank {rank}: {cause}")
        if not self.refusal:
            self._report(rank, failure, cause)
        if self._events:
            # The keeper records deaths too, with the step of each rank; only the parent knows how a process ended.
            self._events.event("failure", kind="exit", rank=rank, cause=cause, exit_code=failure.exitcode, **records)

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


class RankProgress:
    """Whether the ranks of this node have completed a step since they were started, read from their status pages."""

    def __init__(self, folder: Path, memory: str) -> None:
        self.memory = RunMemory.of(folder.resolve().name, folder, memory)
        self.watch(set())

    def watch(self, processes: set[int]) -> None:
        """Begins again, with these processes."""
        self._processes, self._first, self._made = processes, -1, False

    def made_a_step(self) -> bool:
        if self._made:
            return True
        try:
            pages = [page for page in self.memory.pages().values() if page["process"] in self._processes]
        except OSError:  # a rank that cannot use the memory either says why
            return False
        if len(pages) < len(self._processes) or any(page["phase"] < Phase.TRAINING for page in pages):
            return False
        step = min(page["step"] for page in pages)
        if self._first < 0:
            self._first = step
        # `ready`: the newest snapshot since the start. Without one (a longer interval) two looks show that steps were done.
        self._made = step > self._first or all(page["ready"] >= 0 for page in pages)
        return self._made


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
