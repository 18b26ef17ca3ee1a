"""The processes of this node's ranks, as torchelastic's agent polls and ends them.

The invariant: when a rank fails, the others are killed at once. They wait for the dead one in a collective, where a rank
handles no signal, and their state is in the snapshots. Only if all that ended so far lost a connection, the rank that broke it
gets a moment to end: it is the cause, and a process may take longer to die than others to notice.
"""

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler

from holdfast.train.forked_ranks import ForkedProcess, ForkServer
from holdfast.train.standby import Spares
from holdfast.train.timeline import FAILED_AT, STARTED_AT, now_text

CAUSE_SECONDS = 1.0
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connectFullMesh failed")
"""What a rank reports that only lost its connection to the one that failed."""


class StartedProcess(SubprocessHandler):
    """A rank whose process torchelastic did not start."""

    def __init__(self, process: "subprocess.Popen[bytes] | ForkedProcess", local_rank: int) -> None:
        self._stdout = self._stderr = None
        self.local_rank_id, self.proc = local_rank, cast("subprocess.Popen[bytes]", process)


class RankProcesses(SubprocessContext):
    """`environments`: the variables of each local rank. A rank runs in its spare process if there is one that is ready, else in
    a process that the fork server makes, else in a new one."""

    def __init__(
        self,
        command: tuple[str, ...],
        environments: dict[int, dict[str, str]],
        logs: LogsSpecs,
        spares: Spares | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._killed: list[int] = []
        self._spares, self._fork_server = spares, fork_server
        self.forked = False
        arguments = dict.fromkeys(environments, command[1:])
        super().__init__("holdfast", command[0], arguments, environments, logs)

    def _start(self) -> None:
        for rank, environment in self.envs.items():
            if self._spares and (spare := self._spares.take(rank, environment)):
                self.subprocess_handlers[rank] = StartedProcess(spare, rank)
            elif self._fork_server and (forked := self._fork_server.start_rank(environment)):
                self.subprocess_handlers[rank] = StartedProcess(forked, rank)
                self.forked = True
            else:
                self.subprocess_handlers[rank] = get_subprocess_handler(
                    str(self.entrypoint), self.args[rank], environment, stdout="", stderr="", local_rank_id=rank
                )

    def wait_for_end(self, seconds: float) -> None:
        """Returns when a rank has ended, at the latest after `seconds`."""
        ends = select.poll()
        descriptors = []
        try:
            for handler in self.subprocess_handlers.values():
                if handler.proc.returncode is None:
                    descriptors.append(os.pidfd_open(handler.proc.pid))
                    ends.register(descriptors[-1], select.POLLIN)
            ends.poll(seconds * 1e3)
        except OSError:  # a kernel without pidfd
            time.sleep(seconds)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Ends the ranks. torchelastic gives no signal when it closes the group because a rank failed."""
        if death_sig is None:
            death_sig = signal.SIGKILL
            self._wait_for_cause()
            self._killed = [rank for rank, one in self.subprocess_handlers.items() if one.proc.poll() is None]
        super().close(death_sig, timeout)
        self._remove_torn_files()

    def _wait_for_cause(self) -> None:
        deadline = time.monotonic() + CAUSE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            ended = [rank for rank, one in self.subprocess_handlers.items() if one.proc.poll() is not None]
            failed = [rank for rank in ended if self.subprocess_handlers[rank].proc.returncode]
            if len(ended) == len(self.subprocess_handlers) or not failed or not all(map(self._lost_peer, failed)):
                return
            self.wait_for_end(left)

    def _lost_peer(self, rank: int) -> bool:
        try:
            content = Path(self.error_files[rank]).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return any(sign in content for sign in LOST_PEER)

    def _remove_torn_files(self) -> None:
        for rank, handler in self.subprocess_handlers.items():
            if handler.proc.poll() is not None:
                _remove_torn(Path(self.error_files[rank]))

    def _poll(self) -> RunProcsResult | None:
        self._remove_torn_files()
        result: RunProcsResult | None = super()._poll()
        if result is not None:
            for rank in self._killed:  # not a cause
                result.failures.pop(rank, None)
        return result


def _remove_torn(error_file: Path) -> None:
    """Removes the error file of a rank that was killed while it wrote it: torchelastic raises when it cannot read one."""
    try:
        json.loads(error_file.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        error_file.unlink()


def rank_environments(group: WorkerGroup, restart: int, failed_at: str | None) -> dict[int, dict[str, str]]:
    """The variables that torch's rendezvous and the ranks read, by local rank."""
    spec = group.spec
    shared: dict[str, Any] = {
        "GROUP_RANK": group.group_rank,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        STARTED_AT: now_text(),
        **({FAILED_AT: failed_at} if failed_at else {}),
    }
    return {
        worker.local_rank: {
            **{name: str(value) for name, value in shared.items()},
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
        }
        for worker in group.workers
    }
