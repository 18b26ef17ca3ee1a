"""The ranks of this node: started, watched and started again by torchelastic, with what went wrong said once.

One supervisor per node. When a rank dies the others are ended at once (their state is held outside of them) and all start again,
up to `max_restarts` times. A mistake of the user's, found by a rank, is not tried again.
"""

import hashlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from holdfast.config import Config, config_to_toml
from holdfast.errors import REFUSED, HoldfastError
from holdfast.journal import PatientJournal
from holdfast.progress import say
from holdfast.publish import publish_text
from holdfast.system.cpu_features import avoid_amx_traps, explain_sigill, reports_amx

MONITOR_SECONDS = 0.1
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connectFullMesh failed")


class Supervisor(LocalElasticAgent):
    """An elastic agent that notes failures as they happen and does not repeat the user's mistakes."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, events: PatientJournal | None) -> None:
        super().__init__(spec=spec, logs_specs=logs, start_method="spawn", exit_barrier_timeout=30)
        self._events = events
        self.refusal: str | None = None
        self.causes: list[str] = []

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._note(result.failures)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # The survivors hang in a collective with the dead one: nothing of theirs is worth waiting for.
        self._shutdown(signal.SIGKILL)

    def _note(self, failures: dict[int, ProcessFailure]) -> None:
        causes = {rank: describe_failure(failure) for rank, failure in failures.items()}
        # times are told in seconds; within one, whoever only lost a connection comes after whoever broke it
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
        again = (
            f"starting all ranks again ({self._remaining_restarts} restarts left)" if self._remaining_restarts else ""
        )
        if not self.refusal:
            say(f"rank {rank} failed: {cause}" + (f"; {again}" if again else ""))
        if self._events:
            # the keeper notes deaths too, with where each rank stood; how a process ended only its parent knows
            self._events.event("failure", kind="exit", rank=rank, cause=cause, exit_code=failure.exitcode)


def describe_failure(failure: ProcessFailure) -> str:
    """The exception's last line, or the signal that ended the process."""
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", message)
    text = str(message).strip()
    if failure.exitcode == -signal.SIGILL:
        return explain_sigill()
    if failure.exitcode < 0 and not Path(failure.error_file).is_file():  # it died without a word
        try:
            return f"killed by {signal.Signals(-failure.exitcode).name}"
        except ValueError:
            return f"exit code {failure.exitcode}"
    lines = [line for line in text.splitlines() if line.strip()]
    return (
        lines[-1].removeprefix("Refused: ").removeprefix("RuntimeError: ") if lines else f"exit code {failure.exitcode}"
    )


def start_ranks(config: Config) -> None:
    """Runs the ranks of this node to their end; raises a HoldfastError with the first cause if they could not get there."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    parallel = config.parallel
    folder = Path(config.train.save) if config.train.save else None
    events = PatientJournal(folder / "events.jsonl") if folder else None
    with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as logs:
        resolved = Path(logs) / "config.toml"
        publish_text(resolved, config_to_toml(config))
        os.environ["HOLDFAST_SUPERVISED"] = "1"
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # passed on to the ranks
        if "OMP_NUM_THREADS" not in os.environ:
            os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // parallel.nproc_per_node))
        if (config.train.bf16 or config.train.fp16) and reports_amx() and not torch.cuda.is_available():
            avoid_amx_traps()
        supervisor = Supervisor(_spec(config, resolved), DefaultLogsSpecs(log_dir=logs), events)
        try:
            result = supervisor.run()
        except SignalException as stopped:
            where = f"; the same command goes on from {folder}" if folder else ""
            say(f"stopped by {signal.Signals(stopped.sigval).name}{where}")
            sys.exit(0 if stopped.sigval in (signal.SIGTERM, signal.SIGUSR1) else 128 + stopped.sigval)
    if result.is_failed():
        if supervisor.refusal:
            raise HoldfastError(supervisor.refusal)
        raise HoldfastError(
            f"gave up after {parallel.max_restarts} restarts; the failures were: {'; '.join(supervisor.causes)}"
            if parallel.max_restarts
            else f"{'; '.join(supervisor.causes)}"
        )


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
