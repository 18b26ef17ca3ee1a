"""The claim of a run folder: one process per node of a run owns it, from before the first write until its end.

    RUN/.claim/node-0/.lease-000003       host, boot id, pid, start time of the process that owns node 0 of the run
    RUN/.claim/snapshots/.lease-000001    the same of the rank 0 that takes snapshots in a training loop of the user's own

Every process that writes into a run folder claims it first; node 0 owns config.toml. The claim is a lease (`leases`), so
exactly one of several simultaneous starts wins, on one host or over a shared file system. It ends when it is released, when
its holder is provably dead (same host), or when the holder has shown no life for the lease time (another host).
"""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType

from holdfast.system.atomic_files import explain_os_error
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import (
    DRAFT,
    PREFIX,
    HeldLease,
    Lease,
    LeaseLost,
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


class RunClaim:
    """A claim that this process holds. A thread shows life; `release` ends it. Usable in a `with` statement."""

    def __init__(self, held: HeldLease, run: Path) -> None:
        self._held, self._run = held, run
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="run claim", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            self._held.release()

    def __enter__(self) -> "RunClaim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _show_life(self) -> None:
        while not self._released.wait(min(BEAT_SECONDS, lease_seconds() / 4)):
            try:
                self._held.check()
            except LeaseLost:
                log(f"{self._run}: another process took over the run, because this one showed no life; stopping")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            with contextlib.suppress(OSError):  # a file system that is away for a moment, or a folder that was removed
                os.utime(self._held.lease.file_in(self._held.folder))


def claim_run(run: Path | str, part: str = "node-0") -> RunClaim:
    """Claims a part of the run (`node-N`, `snapshots`); RunInUse names the live process that holds it."""
    run = Path(run)
    folder = run / FOLDER / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _win(folder, run)
    except OSError as error:
        raise explain_os_error(error, run / FOLDER) from error
    for name in os.listdir(folder):
        earlier = name.startswith(PREFIX) and name < held.lease.file_in(folder).name
        if earlier or name.startswith(DRAFT):  # of a process that was killed, or that has lost
            (folder / name).unlink(missing_ok=True)
    return RunClaim(held, run)


def _win(folder: Path, run: Path) -> HeldLease:
    watch = _HolderWatch(folder, run)
    while True:
        lease = newest_lease(folder)
        if lease is None or watch.is_over(lease):
            held = claim(folder, lease, None, None)
            if held is not None:
                newest = newest_lease(folder)
                if newest is not None and newest.token == held.lease.token:
                    return held
                # The list of leases was older than the last holder, which removed the numbers below its own.
                held.lease.file_in(folder).unlink(missing_ok=True)
        else:
            time.sleep(POLL_SECONDS)


class _HolderWatch:
    """Decides whether the holder of the newest lease is gone, on this process's own clock."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._folder, self._run = folder, run
        self._began = self._changed = time.monotonic()
        self._sign: tuple[object, ...] = ()
        self._alive = self._announced = False

    def is_over(self, lease: Lease) -> bool:
        """Whether the next number may be tried for; raises if the holder lives."""
        if lease.holder_writes_no_more():
            return True
        now = time.monotonic()
        sign = self._sign_of_life(lease)
        if sign != self._sign:
            self._alive = bool(self._sign)
            self._sign, self._changed = sign, now
        local = lease.holder is not None and lease.holder.is_local()
        if (local or self._alive) and now - self._began > LEAVE_SECONDS:
            raise RunInUse(
                f"{self._run} is in use: {lease.describe()} trains into it. Stop that run first: "
                f"holdfast persist {self._run} --stop"
            )
        if not local and not self._announced and now - self._began > LEAVE_SECONDS:
            self._announced = True
            log(
                f"{self._run} was claimed by {lease.describe()}; waiting up to {lease_seconds():.0f} s to see whether that "
                "process is alive"
            )
        return now - self._changed > lease_seconds()

    def _sign_of_life(self, lease: Lease) -> tuple[object, ...]:
        with contextlib.suppress(FileNotFoundError):
            return lease.number, lease.token, os.stat(lease.file_in(self._folder)).st_mtime_ns
        return lease.number, lease.token
