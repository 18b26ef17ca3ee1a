"""Exactly once: however many processes ask for a file, one brings it, and nobody ever sees half of it.

The story: look in the cache, where a file that has its name is whole. Otherwise look who holds the lease: nobody, or one that
gave up or died, then try to hold it and download; somebody who lives, then wait for the file to appear.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.assets import cache
from holdfast.assets.cache import Entry, Record
from holdfast.assets.catalog import FileSpec, is_known, is_url, wanted_file, wanted_files
from holdfast.assets.part import Part
from holdfast.assets.sources import SourceError
from holdfast.assets.transfer import Deadline, Transfer
from holdfast.assets.waiting import DownloadWaiter
from holdfast.system import atomic_files as publish
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.leases import Lease, LeaseLost, OwnedLease, claim, newest_lease
from holdfast.system.processes import boot_id
from holdfast.system.progress import progress

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Fetched:
    """A file in the cache. `downloaded` tells whether this very call brought it."""

    url: str
    path: Path
    size: int
    sha256: str
    downloaded: bool


def fetch(
    name_or_url: str,
    sha256: str | None = None,
    cache_dir: Path | str | None = None,
    timeout: float | None = None,
    offline: bool | None = None,
) -> Path:
    """The local path of a file that is brought into the cache once, however many processes ask for it at the same time.

    `name_or_url`: http(s)://, file://, hf://org/repo/file, s3://bucket/key, or a file of the catalog (`gpt2/vocab`).
    `sha256`: what the bytes must be. `timeout`: seconds until it gives up, waiting included. `offline`: only what is
    cached (default: $HOLDFAST_OFFLINE).
    """
    wanted = wanted_file(name_or_url)
    return fetch_wanted(with_checksum(wanted, sha256), cache_dir, timeout, offline).path


def resolve(name_or_path: Path | str, role: str | None = None, cache_dir: Path | str | None = None) -> Path:
    """What a flag that takes a file means: a path that is there stays itself, a URL or a catalog name is fetched.

    `role` chooses where a name stands for several files: `resolve("gpt2", "merges")`.
    """
    path, text = Path(name_or_path), str(name_or_path)
    if path.is_file() or (role is None and path.exists()):
        return path
    if is_url(text) or (isinstance(name_or_path, str) and is_known(text)):
        return fetch_wanted(wanted_file(text, role), cache_dir).path
    raise HoldfastError(f"there is no file {text}, and it is not a URL or a known name (holdfast fetch --list)")


def catalog_files(name: str, cache_dir: Path | str | None = None) -> dict[str, Path]:
    """All files of a catalog name, fetched, by role: `catalog_files("gpt2")` has `vocab` and `merges`."""
    if is_url(name):
        raise UsageError(f"{name} is a URL, not a name of the catalog")
    return {role: fetch_wanted(wanted, cache_dir).path for role, wanted in wanted_files(name).items()}


def with_checksum(wanted: FileSpec, sha256: str | None) -> FileSpec:
    if sha256 is None:
        return wanted
    checksum = sha256.lower().removeprefix("sha256:")
    if len(checksum) != 64 or not set(checksum) <= set("0123456789abcdef"):
        raise UsageError(f"'{sha256}' is not a sha256: that is 64 hexadecimal digits")
    return replace(wanted, sha256=checksum)


def fetch_wanted(
    wanted: FileSpec,
    cache_dir: Path | str | None = None,
    timeout: float | None = None,
    offline: bool | None = None,
    announce: Callable[[str], None] = lambda url: None,
) -> Fetched:
    entry = cache.entry_of(cache.cache_folder(cache_dir), wanted.url)
    found = _find(entry, wanted)
    if found:
        return found
    if _is_offline() if offline is None else offline:
        raise HoldfastError(
            f"{cache.without_credentials(wanted.url)} is not cached and this is offline: looked in {entry.folder}; "
            "fetch it once with a network, or set HOLDFAST_CACHE to a folder that has it"
        )
    try:
        return _bring_or_wait(entry, wanted, Deadline(timeout), announce)
    except OSError as error:
        raise _explained(error, entry, wanted) from error


def _is_offline() -> bool:
    return os.environ.get("HOLDFAST_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _find(entry: Entry, wanted: FileSpec) -> Fetched | None:
    found = entry.find()
    if found is None:
        return None
    path, record = found
    if wanted.sha256 and record.sha256 != wanted.sha256:
        raise HoldfastError(
            f"{path} has sha256 {record.sha256}, not {wanted.sha256}: another file was cached from this URL; "
            f"check the checksum, or remove {entry.folder} to fetch anew"
        )
    return Fetched(record.url, path, record.size, record.sha256, downloaded=False)


def _bring_or_wait(entry: Entry, wanted: FileSpec, deadline: Deadline, announce: Callable[[str], None]) -> Fetched:
    watch = DownloadWaiter(entry.folder, wanted, deadline)
    while True:
        found = _find(entry, wanted)
        if found:
            return found
        lease = watch.growing()
        if lease is None:
            lease = newest_lease(entry.folder)
            if lease is None or watch.may_succeed(lease):
                brought = _try_to_bring(entry, wanted, lease, deadline, announce)
                if brought:
                    return brought
                continue
        watch.wait(lease)


def _try_to_bring(
    entry: Entry, wanted: FileSpec, last: Lease | None, deadline: Deadline, announce: Callable[[str], None]
) -> Fetched | None:
    """Claims the lease after `last` and downloads; None if it became somebody else's turn."""
    entry.folder.mkdir(parents=True, exist_ok=True)
    # A part goes on only if its writer surely does not: one that may be asleep keeps its own, and we copy.
    part = last.part if last and last.has_ended() else None
    try:
        held = claim(entry.folder, last, part, wanted.sha256)
        return _download(entry, wanted, held, last, deadline, announce) if held else None
    except (LeaseLost, FileNotFoundError):
        return None  # succeeded by another process, or the cache was cleared under us


def _download(
    entry: Entry,
    wanted: FileSpec,
    held: OwnedLease,
    predecessor: Lease | None,
    deadline: Deadline,
    announce: Callable[[str], None],
) -> Fetched:
    """The holder's work, from the claim to the file's final name."""
    found = _find(entry, wanted)
    if found:
        entry.sweep()
        return found
    part = Part(entry.folder / held.lease.part)
    try:
        _inherit(part, predecessor, held)
        expected, origin = _expected(entry, wanted)
        with progress(f"fetching {wanted.name or cache.name_in_url(wanted.url)}", wanted.size) as bar:
            Transfer(expected, part, deadline, bar, held.beat, announce, origin).run()
        held.check()
        name = wanted.name or part.about.name
        record = Record(cache.without_credentials(wanted.url), name, part.size, part.sha256())
        path = entry.publish(part.path, record)
    except (LeaseLost, FileNotFoundError):
        held.release()
        raise
    except SourceError as error:
        failure = HoldfastError(f"cannot fetch {error}")
        _give_up(part, held, str(failure))
        raise failure from error
    except OSError as error:
        # A full disk gets its room back, and those who wait would meet the same.
        part.remove()
        held.release(str(_explained(error, entry, wanted)) if error.errno in NO_ROOM else None)
        raise
    except BaseException:
        _give_up(part, held, None)
        raise
    finally:
        part.close()
    entry.sweep()
    return Fetched(record.url, path, record.size, record.sha256, downloaded=True)


def _inherit(part: Part, predecessor: Lease | None, held: OwnedLease) -> None:
    if predecessor is None or predecessor.holder is None:
        return
    trust_all = predecessor.holder.boot == boot_id()
    if part.path.name == predecessor.part:
        part.continue_bytes(trust_all, held.beat)
    else:
        part.copy_from(part.path.with_name(predecessor.part), trust_all, held.beat)


def _give_up(part: Part, held: OwnedLease, error: str | None) -> None:
    try:
        part.keep_or_remove()
    finally:
        held.release(error)


def _expected(entry: Entry, wanted: FileSpec) -> tuple[FileSpec, str]:
    """Where nobody published a checksum, the first download recorded one. Also says where the checksum is from."""
    record = entry.record()
    if wanted.sha256 or wanted.changes or record is None:
        return wanted, ""
    origin = f" (recorded at the first download; to accept another file remove {entry.folder})"
    return replace(wanted, sha256=record.sha256), origin


def _explained(error: OSError, entry: Entry, wanted: FileSpec) -> Exception:
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return HoldfastError(f"the cache {entry.folder.parent} is not a folder: choose another with --cache-dir")
    if error.errno == errno.ENOENT:
        return HoldfastError(f"the cache {entry.folder.parent} cannot be created: choose another with --cache-dir")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HoldfastError(
            f"{cache.without_credentials(wanted.url)} is not cached and {entry.folder.parent} cannot be written "
            f"({error.strerror}): choose another folder with --cache-dir or HOLDFAST_CACHE"
        )
    return publish.explain_os_error(error, entry.folder / (wanted.name or cache.name_in_url(wanted.url)))
