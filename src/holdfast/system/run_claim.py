"""The claim of a run folder: one process per node of a run owns it, from before the first write until its end.

    RUN/.claim/node-0/.lease-000003       host, boot id, pid and start time of the process that owns node 0 of the run
    RUN/.claim/snapshots/.lease-000001    the same for rank 0 of a user's own training loop that takes snapshots

Every process that writes to a run folder claims it first; node 0 owns config.toml. The claim is a lease (`leases`), so
exactly one of several simultaneous starts wins, on one host or over a shared file system. It ends when it is released, when
its holder is provably dead (same host), or when the holder was silent for the lease time (another host).
"""

import os
import signal
import time
from pathlib import Path
from shlex import quote

from holdfast.system.atomic_files import explain_os_error
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import (
    DRAFT,
    PREFIX,
    BackgroundLease,
    HolderLiveness,
    Lease,
    OwnedLease,
    claim,
    lease_seconds,
    newest_lease,
)
from holdfast.system.progress import log

FOLDER = ".claim"
BEAT_SECONDS = 5.0
LEAVE_SECONDS = 3.0
"""A holder that is just ending gets this long before the claim is refused."""
POLL_SECONDS = 0.1


class RunInUse(HoldfastError):
    """A live process holds the claim."""


def claim_run(run: Path | str, part: str = "node-0") -> BackgroundLease:
    """Claims a part of the run (`node-N`, `snapshots`); RunInUse names the live process that holds it. A holder that loses the
    claim to another process gets SIGTERM."""
    run = Path(run)
    folder = run / FOLDER / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owned = _win(folder, run)
    except OSError as error:
        raise explain_os_error(error, run / FOLDER) from error
    for name in os.listdir(folder):
        earlier = name.startswith(PREFIX) and name < owned.file.name
        if earlier or name.startswith(DRAFT):  # of a process that was killed, or that has lost
            (folder / name).unlink(missing_ok=True)

    def stop() -> None:
        log(f"{run}: another process took over the run, because this one was silent for too long; stopping")
        os.kill(os.getpid(), signal.SIGTERM)

    return BackgroundLease(owned, stop, BEAT_SECONDS)


def _win(folder: Path, run: Path) -> OwnedLease:
    holder, began, announced = HolderLiveness(folder), time.monotonic(), False
    while True:
        lease = newest_lease(folder)
        if lease is None or holder.is_gone(lease):
            owned = claim(folder, lease)
            if owned is not None:
                newest = newest_lease(folder)
                if newest is not None and newest.token == owned.lease.token:
                    return owned
                # The list of leases was older than the last holder, which removed the numbers below its own.
                owned.file.unlink(missing_ok=True)
            continue
        if time.monotonic() - began > LEAVE_SECONDS:
            _refuse_live_holder(lease, holder, run)
            if not announced:
                announced = True
                log(
                    f"{run} was claimed by {lease.describe()}; waiting up to {lease_seconds():.0f} s to see whether that "
                    "process is alive"
                )
        time.sleep(POLL_SECONDS)


def _refuse_live_holder(lease: Lease, holder: HolderLiveness, run: Path) -> None:
    if holder.seen_alive or (lease.holder is not None and lease.holder.is_local()):
        raise RunInUse(
            f"{run} is in use: {lease.describe()} trains into it. Stop that run first: "
            f"holdfast persist {quote(str(run))} --stop"
        )
