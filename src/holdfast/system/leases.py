"""Leases: one process at a time does a piece of work, agreed over nothing but a shared folder: no flock, no clock, no server.

Leases are numbered files, `.lease-000001`, `.lease-000002`, ...; the highest number holds. link(2) of a complete file creates
a lease, and exactly one process can win a number. A takeover is nothing but winning the next number: no lease is broken or
deleted while the work is unfinished, so at no moment do two hold, and a takeover cannot hit the wrong lease. (Without
link(2), O_EXCL decides; a reader may then find a lease that is still empty, and trusts only its own clock.)

A holder may be succeeded when it released its lease, when it is provably dead (same boot, same pid namespace, and the pid is
gone, reused or a zombie), or when nothing of it changed for the lease time on the successor's own clock. A holder that was
only stopped notices at its next beat that it was succeeded. Both may then have worked: that costs time and nothing else,
because each writes to a part of its own.
"""

import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.system.errors import UsageError
from holdfast.system.processes import ProcessIdentity, this_process

PREFIX, DRAFT = ".lease-", ".claim-"
LEASE_SECONDS = 60.0
BEAT_SECONDS = 1.0
LINK_IS_NOT_SUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class LeaseLost(Exception):
    """Another process holds the lease now: it took this one for dead."""


def lease_seconds() -> float:
    """How long a holder may stay silent. Folders with long attribute caches (NFS) may need more than the default."""
    given = os.environ.get("HOLDFAST_LEASE_SECONDS", LEASE_SECONDS)
    try:
        return float(given)
    except ValueError:
        raise UsageError(f"HOLDFAST_LEASE_SECONDS is '{given}', which is not a number of seconds") from None


@dataclass(frozen=True)
class Lease:
    """The content of a lease file."""

    number: int
    holder: ProcessIdentity | None
    """None while the lease is being written, where there is no link(2)."""
    token: str
    part: str
    """The name of the part that the holder writes; inherited from a predecessor that provably writes no more."""
    expects: str | None
    """The sha256 that the holder expects: a process that expects the same would fail in the same way."""
    rank: str | None = None
    released: bool = False
    error: str | None = None

    def file_in(self, folder: Path) -> Path:
        return folder / f"{PREFIX}{self.number:06d}"

    def has_ended(self) -> bool:
        """True only with proof: the holder released the lease, or it is dead."""
        return self.released or (self.holder is not None and self.holder.is_dead())

    def describe(self) -> str:
        if self.holder is None:
            return "another process"
        rank = f", rank {self.rank}" if self.rank else ""
        return f"process {self.holder.pid} on {self.holder.host}{rank}"


def newest_lease(folder: Path) -> Lease | None:
    # Listing the folder, unlike opening a name, makes an NFS client ask the server.
    try:
        numbers = [
            int(name[len(PREFIX) :])
            for name in os.listdir(folder)
            if name.startswith(PREFIX) and name[len(PREFIX) :].isdigit()
        ]
    except FileNotFoundError:
        return None
    return _read(folder, max(numbers)) if numbers else None


def _read(folder: Path, number: int) -> Lease | None:
    unknown = Lease(number, None, f"unknown-{number}", "", None)
    try:
        with open(f"{folder}/{PREFIX}{number:06d}", "rb", buffering=0) as file:  # read often: few system calls
            content = json.loads(file.read(1 << 16))
        lease = Lease(number, ProcessIdentity(**content.pop("holder")), **content)
        # A process that can write here must not be able to name a file elsewhere.
        return lease if Path(lease.part).name == lease.part else unknown
    except FileNotFoundError:
        return None  # removed: the work is done
    except (ValueError, TypeError, KeyError):
        return unknown


def claim(
    folder: Path, after: Lease | None, part: str | None = None, expects: str | None = None
) -> "OwnedLease | None":
    """Tries to win the number after `after`; None when another process did. Without `part` the lease gets a new one."""
    token = secrets.token_hex(8)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID")
    number = after.number + 1 if after else 1
    lease = Lease(number, this_process(), token, part or f".{token}.part", expects, rank)
    return OwnedLease(folder, lease) if _create(folder, lease) else None


def _content(lease: Lease) -> bytes:
    fields = asdict(lease)
    fields.pop("number")
    return json.dumps(fields).encode()


def _create(folder: Path, lease: Lease) -> bool:
    final, draft = lease.file_in(folder), folder / f"{DRAFT}{lease.token}.tmp"
    draft.write_bytes(_content(lease))
    try:
        os.link(draft, final)
        return True
    except FileExistsError:
        # An NFS server may have created the link although its answer was lost.
        try:
            return draft.stat().st_nlink == 2
        except FileNotFoundError:  # the process that won has removed the drafts of the others
            return False
    except FileNotFoundError:
        return False  # removed by a process that finished, or the folder was cleared
    except OSError as error:
        if error.errno not in LINK_IS_NOT_SUPPORTED:
            raise
        return _create_exclusively(final, lease)
    finally:
        draft.unlink(missing_ok=True)


def _create_exclusively(final: Path, lease: Lease) -> bool:
    try:
        with open(final, "xb") as file:
            file.write(_content(lease))
    except FileExistsError:
        return False
    return True


class OwnedLease:
    """A lease that this process won."""

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self.lease = folder, lease
        self.file = lease.file_in(folder)
        self._successor = replace(lease, number=lease.number + 1).file_in(folder)
        self._last_beat = time.monotonic()

    def beat(self) -> None:
        """Shows that this process is alive, and raises LeaseLost if it was succeeded. Cheap to call often."""
        now = time.monotonic()
        if now - self._last_beat >= min(BEAT_SECONDS, lease_seconds() / 4):
            self._last_beat = now
            self.check()
            try:
                os.utime(self.file)
            except FileNotFoundError:
                raise LeaseLost from None

    def check(self) -> None:
        if self._successor.exists():
            raise LeaseLost

    def release(self, error: str | None = None) -> None:
        """Marks the lease as released. It stays, so that the next holder finds the part; waiting processes report `error`."""
        if not self.file.exists():
            return  # removed: the work is done
        draft = self.folder / f"{DRAFT}{self.lease.token}.tmp"
        try:
            draft.write_bytes(_content(replace(self.lease, released=True, error=error)))
            os.replace(draft, self.file)
        except OSError:
            # A full disk or a cleared folder: the others notice that this process ends or stays silent.
            draft.unlink(missing_ok=True)


class BackgroundLease:
    """Keeps a lease alive from a thread until `release`. Usable in a `with` statement."""

    def __init__(
        self, owned: OwnedLease, on_lost: Callable[[], None] = lambda: None, seconds: float = BEAT_SECONDS
    ) -> None:
        self._owned, self._on_lost, self._seconds = owned, on_lost, seconds
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            self._owned.release()

    def __enter__(self) -> "BackgroundLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(min(self._seconds, lease_seconds() / 4)):
            try:
                with suppress(OSError):  # a file system that does not answer for a moment, or a folder that was removed
                    self._owned.check()
                    os.utime(self._owned.file)
            except LeaseLost:
                self._on_lost()
                return


class HolderLiveness:
    """Decides on this process's own clock whether the holder of the newest lease in a folder is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state: tuple[object, ...] = ()
        self._changed_at = time.monotonic()
        self.seen_alive = False
        """The holder changed something while this process watched."""

    def is_gone(self, lease: Lease) -> bool:
        """Whether the next lease may be claimed."""
        state = self._observe(lease)
        if state != self._state:
            self.seen_alive = bool(self._state)
            self._state, self._changed_at = state, time.monotonic()
        return lease.has_ended() or time.monotonic() - self._changed_at > lease_seconds()

    def note_change(self) -> None:
        """The caller saw a change itself."""
        self._changed_at = time.monotonic()

    def _observe(self, lease: Lease) -> tuple[object, ...]:
        """Changes whenever the holder works: its part grows, or it touches its lease."""
        state: list[object] = [lease.number, lease.token]
        for path in (lease.file_in(self._folder), f"{self._folder}/{lease.part or '.none'}"):
            with suppress(FileNotFoundError):
                status = os.stat(path)
                state += [status.st_size, status.st_mtime_ns]
        return tuple(state)
