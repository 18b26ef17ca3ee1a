"""Preprocessing shared out over the workers of a Dask cluster, for those who have one and no Slurm.

Dask only hands out the partitions and tries a failed one again; each is the same command that a task of a Slurm array runs, in
a process of its own, so a partition that is finished is left alone and the result does not depend on who made which.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from holdfast.launch.sharing import SKIPPED_LINES, Sharing
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import progress

RETRIES = 2
CONNECT_SECONDS = 15


def run_partitions(scheduler: str, sharing: Sharing) -> str:
    """Makes every share on the cluster, then joins them; returns what the join printed."""
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise HoldfastError("Dask is not installed: pip install 'holdfast[dask]', here and on the workers") from None
    client = connect(Client, scheduler)
    try:
        commands = [[*sharing.command, "--partition-index", str(index)] for index in range(sharing.partitions)]
        futures = client.map(run_command, commands, pure=False, retries=RETRIES)
        with progress("partitions", sharing.partitions, unit="partitions") as bar:
            for future in as_completed(futures):
                if future.status != "finished":
                    raise HoldfastError(str(future.exception()))
                bar.advance()
        return str(client.submit(run_command, sharing.command, pure=False, retries=RETRIES).result())
    finally:
        client.close()


def connect(client: Any, scheduler: str) -> Any:
    try:
        return client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise HoldfastError(f"no Dask scheduler answers at {scheduler}: {error}") from None


def run_command(command: Sequence[str]) -> str:
    """On a worker: Holdfast's own command line, with its last words as the error."""
    done = subprocess.run([sys.executable, "-m", "holdfast.cli", *command], capture_output=True, text=True, check=False)
    if done.returncode not in (0, SKIPPED_LINES):
        raise RuntimeError(f"holdfast {command[0]} failed on a worker: {done.stderr.strip() or done.returncode}")
    return done.stdout
