"""Who brings a file, agreed between processes that share nothing but a folder: no flock, no clock, no server.

Leases are numbered files, `.lease-000001`, `.lease-000002`, ...; the highest number holds. A lease is born by link(2) of a
complete file, which exactly one process can win, and taking over is nothing but winning the next number: no lease is ever
broken or deleted while the file is not there, so there is no moment in which two can hold and none in which a take-over
can hit the wrong lease. (Without link(2), O_EXCL decides; then a reader may meet a lease that is still empty, and trusts
only time with it.)

A holder may be succeeded when it gave up, when it is provably dead (same boot, same pid namespace, and the pid is gone, is
another process by now, or is a zombie), or when nothing of it changed for the lease time on the successor's own clock.
A holder that was only asleep learns at its next beat that it was succeeded. Both may then have downloaded: that costs
bandwidth and nothing else, because each writes to a part of its own.
"""

import errno
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.system.errors import UsageError
from holdfast.system.processes import ProcessIdentity, this_process

PREFIX, DRAFT = ".lease-", ".claim-"
LEASE_SECONDS = 60.0
BEAT_SECONDS = 1.0
LINK_IS_NOT_SUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class LeaseLost(Exception):
    """Another process holds the lease now: it thought this one dead."""


def lease_seconds() -> float:
    """How long a silent holder is believed. Folders with long attribute caches (NFS) may need more than the default."""
    given = os.environ.get("HOLDFAST_LEASE_SECONDS", LEASE_SECONDS)
    try:
        return float(given)
    except ValueError:
        raise UsageError(f"HOLDFAST_LEASE_SECONDS is '{given}', which is no number of seconds") from None


@dataclass(frozen=True)
class Lease:
    """The content of a lease file."""

    number: int
    holder: ProcessIdentity | None
    """None while the lease is being written, where there is no link(2)."""
    token: str
    part: str
    """The name of the part that the holder writes, inherited from a predecessor that surely writes no more."""
    expects: str | None
    """The sha256 that the holder was asked for: whoever expects the same would fail as it fails."""
    rank: str | None = None
    released: bool = False
    error: str | None = None

    def file_in(self, folder: Path) -> Path:
        return folder / f"{PREFIX}{self.number:06d}"

    def holder_writes_no_more(self) -> bool:
        """True only with proof: it gave up, or it is dead."""
        return self.released or (self.holder is not None and self.holder.is_dead())

    def describe(self) -> str:
        if self.holder is None:
            return "another process"
        rank = f", rank {self.rank}" if self.rank else ""
        return f"process {self.holder.pid} on {self.holder.host}{rank}"


def newest_lease(folder: Path) -> Lease | None:
    # Listing the folder, unlike asking for a name, makes an NFS client look at the server.
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
        # Whoever can write here must not be able to point us at a file elsewhere.
        return lease if Path(lease.part).name == lease.part else unknown
    except FileNotFoundError:
        return None  # swept: the file is there by now
    except (ValueError, TypeError, KeyError):
        return unknown


def claim(folder: Path, after: Lease | None, part: str | None, expects: str | None) -> "HeldLease | None":
    """Tries to win the number after `after`; None when another process did. `part` None starts a part of one's own."""
    token = secrets.token_hex(8)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID")
    number = after.number + 1 if after else 1
    lease = Lease(number, this_process(), token, part or f".{token}.part", expects, rank)
    return HeldLease(folder, lease) if _create(folder, lease) else None


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
        # An NFS server may have done it and lost the answer.
        return draft.stat().st_nlink == 2
    except FileNotFoundError:
        return False  # swept by one that finished, or the cache was cleared
    except OSError as error:
        if error.errno not in LINK_IS_NOT_SUPPORTED:
            raise
        return _create_exclusively(final, lease)
    finally:
        draft.unlink(missing_ok=True)


def _create_exclusively(final: Path, lease: Lease) -> bool:
    try:
        descriptor = os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(_content(lease))
    return True


class HeldLease:
    """A lease that this process won."""

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self.lease = folder, lease
        self._file = lease.file_in(folder)
        self._successor = replace(lease, number=lease.number + 1).file_in(folder)
        self._last_beat = time.monotonic()

    def beat(self) -> None:
        """Shows life where the part does not grow, and learns about a successor. Cheap to call often."""
        now = time.monotonic()
        if now - self._last_beat >= min(BEAT_SECONDS, lease_seconds() / 4):
            self._last_beat = now
            self.check()
            try:
                os.utime(self._file)
            except FileNotFoundError:
                raise LeaseLost from None

    def check(self) -> None:
        if self._successor.exists():
            raise LeaseLost

    def release(self, error: str | None = None) -> None:
        """Gives up. The lease stays, marked, so that the next holder finds the part; `error` is for those who waited."""
        draft = self.folder / f"{DRAFT}{self.lease.token}.tmp"
        if not self._file.exists():
            return  # swept: the file is there
        try:
            draft.write_bytes(_content(replace(self.lease, released=True, error=error)))
            os.replace(draft, self._file)
        except OSError:
            # A full disk or a cleared cache: then the others learn it by this process's death or silence.
            draft.unlink(missing_ok=True)
