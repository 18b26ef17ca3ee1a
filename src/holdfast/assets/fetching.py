"""Exactly once: however many processes ask for a file, one downloads it, and no process ever sees half of it.

The order: look in the cache, where a file under its final name is whole. Otherwise read the newest lease. If there is none, or
its holder released it or died, claim the next one and download. If its holder is alive, wait for the file to appear.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.assets import cache
from holdfast.assets.cache import CacheEntry, CacheRecord
from holdfast.assets.catalog import FileSpec, file_spec, file_specs, is_known, is_url
from holdfast.assets.partial_file import PartialFile
from holdfast.assets.sources import SourceError
from holdfast.assets.transfer import Deadline, Transfer
from holdfast.assets.waiting import DownloadWaiter
from holdfast.system.atomic_files import DISK_FULL, explain_os_error
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.leases import Lease, LeaseLost, OwnedLease, claim, newest_lease
from holdfast.system.processes import boot_id
from holdfast.system.progress import progress


@dataclass(frozen=True)
class Fetched:
    """A file in the cache. `downloaded`: this very call downloaded it."""

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
    """Downloads a file into the cache, once however many processes ask for it at the same time; returns its local path.

    `name_or_url`: http(s)://, file://, hf://org/repo/file, s3://bucket/key, or a file of the catalog (`gpt2/vocab`).
    `sha256`: the checksum that the file must have. `timeout`: seconds until it gives up, waiting included. `offline`: use
    only what is cached (default: $HOLDFAST_OFFLINE).
    """
    return fetch_file(with_checksum(file_spec(name_or_url), sha256), cache_dir, timeout, offline).path


def resolve(name_or_path: Path | str, role: str | None = None, cache_dir: Path | str | None = None) -> Path:
    """Resolves the value of a flag that takes a file: an existing path stays as it is, a URL or catalog name is fetched.

    `role` chooses where a name stands for several files: `resolve("gpt2", "merges")`.
    """
    path, text = Path(name_or_path), str(name_or_path)
    if path.is_file() or (role is None and path.exists()):
        return path
    if is_url(text) or (isinstance(name_or_path, str) and is_known(text)):
        return fetch_file(file_spec(text, role), cache_dir).path
    raise HoldfastError(f"there is no file {text}, and it is not a URL or a known name (holdfast fetch --list)")


def catalog_files(name: str, cache_dir: Path | str | None = None) -> dict[str, Path]:
    """Fetches all files of a catalog name, by role: `catalog_files("gpt2")` has `vocab` and `merges`."""
    if is_url(name):
        raise UsageError(f"{name} is a URL, not a name of the catalog")
    return {role: fetch_file(spec, cache_dir).path for role, spec in file_specs(name).items()}


def with_checksum(spec: FileSpec, sha256: str | None) -> FileSpec:
    if sha256 is None:
        return spec
    checksum = sha256.lower().removeprefix("sha256:")
    if len(checksum) != 64 or not set(checksum) <= set("0123456789abcdef"):
        raise UsageError(f"'{sha256}' is not a sha256, which has 64 hexadecimal digits")
    return replace(spec, sha256=checksum)


def fetch_file(
    spec: FileSpec,
    cache_dir: Path | str | None = None,
    timeout: float | None = None,
    offline: bool | None = None,
    on_request: Callable[[str], None] = lambda url: None,
) -> Fetched:
    """As `fetch`, for a file specification. `on_request` receives the URL of every request for bytes."""
    entry = cache.entry_of(cache.cache_folder(cache_dir), spec.url)
    request = _FileRequest(spec, entry, Deadline(timeout), on_request)
    found = request.find()
    if found:
        return found
    if offline is None:
        offline = os.environ.get("HOLDFAST_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if offline:
        raise HoldfastError(
            f"{cache.without_credentials(spec.url)} is not cached and this is offline: looked in {entry.folder}; "
            "fetch it once with a network, or set HOLDFAST_CACHE to a folder that has it"
        )
    try:
        return request.download_or_wait()
    except OSError as error:
        raise request.explain(error) from error


@dataclass(frozen=True)
class _FileRequest:
    """One call of `fetch`: a file, its place in the cache, and a time limit."""

    spec: FileSpec
    entry: CacheEntry
    deadline: Deadline
    on_request: Callable[[str], None]

    def find(self) -> Fetched | None:
        found = self.entry.find()
        if found is None:
            return None
        path, record = found
        if self.spec.sha256 and record.sha256 != self.spec.sha256:
            raise HoldfastError(
                f"{path} has sha256 {record.sha256}, not {self.spec.sha256}: another file was cached from this URL; "
                f"check the checksum, or remove {self.entry.folder} to download it again"
            )
        return Fetched(record.url, path, record.size, record.sha256, downloaded=False)

    def download_or_wait(self) -> Fetched:
        waiter = DownloadWaiter(self.entry.folder, self.spec, self.deadline)
        while True:
            found = self.find()
            if found:
                return found
            lease = waiter.growing_lease()
            if lease is None:
                lease = newest_lease(self.entry.folder)
                if lease is None or waiter.may_take_over(lease):
                    downloaded = self._claim_and_download(lease)
                    if downloaded:
                        return downloaded
                    continue
            waiter.wait(lease)

    def _claim_and_download(self, last: Lease | None) -> Fetched | None:
        """Claims the lease after `last` and downloads; None if another process holds a newer lease."""
        self.entry.folder.mkdir(parents=True, exist_ok=True)
        # Continue a part only if its writer provably does not; the part of one that may be stopped is copied instead.
        part = last.part if last and last.has_ended() else None
        try:
            owned = claim(self.entry.folder, last, part, self.spec.sha256)
            return self._download(owned, last) if owned else None
        except (LeaseLost, FileNotFoundError):
            return None  # another process took over, or the cache was cleared

    def _download(self, owned: OwnedLease, predecessor: Lease | None) -> Fetched:
        """The holder's work, from the claim to the file's final name."""
        found = self.find()
        if found:
            self.entry.remove_leftovers()
            return found
        part = PartialFile(self.entry.folder / owned.lease.part)
        try:
            _inherit(part, predecessor, owned)
            expected, origin = self._expected()
            with progress(f"fetching {self._name}", self.spec.size) as bar:
                Transfer(expected, part, self.deadline, bar, owned.beat, self.on_request, origin).run()
            owned.check()
            name = self.spec.name or part.state.name
            record = CacheRecord(cache.without_credentials(self.spec.url), name, part.size, part.sha256())
            path = self.entry.publish(part.path, record)
        except (LeaseLost, FileNotFoundError):
            owned.release()
            raise
        except SourceError as error:
            failure = HoldfastError(f"cannot fetch {error}")
            _give_up(part, owned, str(failure))
            raise failure from error
        except OSError as error:
            # A full disk gets its space back; the waiting processes would fail in the same way.
            part.remove()
            owned.release(str(self.explain(error)) if error.errno in DISK_FULL else None)
            raise
        except BaseException:
            _give_up(part, owned, None)
            raise
        finally:
            part.close()
        self.entry.remove_leftovers()
        return Fetched(record.url, path, record.size, record.sha256, downloaded=True)

    def _expected(self) -> tuple[FileSpec, str]:
        """The specification with the checksum of the first download where none is published, and where that one is from."""
        record = self.entry.record()
        if self.spec.sha256 or self.spec.changes or record is None:
            return self.spec, ""
        origin = f" (recorded at the first download; to accept another file remove {self.entry.folder})"
        return replace(self.spec, sha256=record.sha256), origin

    @property
    def _name(self) -> str:
        return self.spec.name or cache.name_in_url(self.spec.url)

    def explain(self, error: OSError) -> Exception:
        folder = self.entry.folder.parent
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            return HoldfastError(f"the cache {folder} is not a folder: choose another with --cache-dir")
        if error.errno == errno.ENOENT:
            return HoldfastError(f"the cache {folder} cannot be created: choose another with --cache-dir")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return HoldfastError(
                f"{cache.without_credentials(self.spec.url)} is not cached and {folder} cannot be written "
                f"({error.strerror}): choose another folder with --cache-dir or HOLDFAST_CACHE"
            )
        return explain_os_error(error, self.entry.folder / self._name)


def _inherit(part: PartialFile, predecessor: Lease | None, owned: OwnedLease) -> None:
    """Takes over the bytes that the last holder downloaded."""
    if predecessor is None or predecessor.holder is None:
        return
    trust_all = predecessor.holder.boot == boot_id()
    if part.path.name == predecessor.part:
        part.continue_bytes(trust_all, owned.beat)
    else:
        part.copy_from(part.path.with_name(predecessor.part), trust_all, owned.beat)


def _give_up(part: PartialFile, owned: OwnedLease, error: str | None) -> None:
    try:
        part.keep_or_remove()
    finally:
        owned.release(error)
