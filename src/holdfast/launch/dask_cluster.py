"""Preprocessing on the workers of a Dask cluster.

Dask only distributes the partitions and retries a failed one. Each partition is the command that a task of a Slurm array runs, in
a process of its own: a finished partition is skipped, and the result does not depend on which worker made which partition.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from holdfast.launch.preprocessing_job import SKIPPED_LINES, PreprocessingJob
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log, progress

RETRIES = 2
CONNECT_SECONDS = 15


def run_partitions(scheduler: str, job: PreprocessingJob) -> str:
    """Makes every partition on the cluster, then joins them; returns what the join printed."""
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise HoldfastError("Dask is not installed: pip install 'holdfast[dask]', here and on the workers") from None
    client = connect(Client, scheduler)
    if not client.scheduler_info()["workers"]:
        log(f"the Dask cluster at {scheduler} has no worker yet; waiting for one")
    try:
        # A single partition needs no part of its own: the join makes the dataset.
        indices = range(job.partitions if job.partitions > 1 else 0)
        commands = [[*job.command, "--partition-index", str(index)] for index in indices]
        futures = client.map(run_command, commands, pure=False, retries=RETRIES)
        with progress("partitions", len(indices), unit="partitions") as bar:
            for future in as_completed(futures):
                printed(future)
                bar.advance()
        return printed(client.submit(run_command, job.command, pure=False, retries=RETRIES))
    finally:
        client.close()


def printed(future: Any) -> str:
    """What the command of a future printed, once it has ended; raises the error of one that failed."""
    error = future.exception()
    if error is not None:
        raise HoldfastError(str(error))
    return str(future.result())


def connect(client: Any, scheduler: str) -> Any:
    try:
        return client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise HoldfastError(f"no Dask scheduler answers at {scheduler}: {error}") from None


def run_command(command: Sequence[str]) -> str:
    """On a worker: runs Holdfast's command line; a failure raises its error message."""
    done = subprocess.run([sys.executable, "-m", "holdfast.cli", *command], capture_output=True, text=True, check=False)
    if done.returncode not in (0, SKIPPED_LINES):
        raise RuntimeError(f"holdfast {command[0]} failed on a worker: {done.stderr.strip() or done.returncode}")
    return done.stdout
