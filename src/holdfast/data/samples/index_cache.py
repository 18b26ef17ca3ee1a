"""Sample indices on disk, built once however many processes start at the same moment, and memory-mapped by all of them.

An index is a folder of `.npy` files whose name carries a hash of everything that decides its content, among it the identity
of the data, so a rebuilt dataset never gets an old index. The invariant: the folder appears whole, by rename
(system/atomic_files.py). Two processes that build the same index write the same bytes, and the second one finds the first one's;
correctness does not depend on a lock. The lease beside it only saves work: its owner builds and renews it, the others wait, and
when the owner is gone or stops renewing, one of them takes over (system/leases.py).
"""

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.system.atomic_files import publish_folder, remove_folder, temporary_beside
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import BackgroundLease, HolderLiveness, Lease, OwnedLease, claim, newest_lease
from holdfast.system.progress import log

# Goes up when files are added or mean something else: an index of an older Holdfast is then rebuilt, not misread.
FORMAT = 1
DESCRIPTION = "description.json"
POLL_SECONDS = 0.1
LOG_AFTER_SECONDS = 5.0

Arrays = dict[str, npt.NDArray[Any]]


def open_index(folder: Path, kind: str, identity: Mapping[str, Any], build: Callable[[Path], None]) -> Arrays:
    """The arrays of the index `kind` of this identity, by file stem; `build(temporary folder)` writes them if need be."""
    description = json.dumps({"format": FORMAT, "kind": kind, **identity}, sort_keys=True, indent=1)
    path = folder / f"{kind}-{hashlib.sha256(description.encode()).hexdigest()[:20]}"
    if not _is_whole(path):
        _build_once(path, description, build)
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(path.glob("*.npy"))}


def index_folder(prefix: Path | str, cache_dir: Path | str | None) -> Path:
    """Where the indices of a dataset are: the given folder, or `PREFIX.index/` beside the data."""
    return Path(cache_dir) if cache_dir is not None else Path(f"{prefix}.index")


def sample_identity(prefix: str, documents: range, **settings: Any) -> dict[str, Any]:
    """What decides the samples of a `.bin/.idx` pair: its sizes and when its index was written, the documents, the settings."""
    index, tokens = Path(f"{prefix}.idx").stat(), Path(f"{prefix}.bin").stat()
    files = {"idx_bytes": index.st_size, "idx_mtime_ns": index.st_mtime_ns, "bin_bytes": tokens.st_size}
    return {"data": Path(prefix).name, **files, "documents": [documents.start, documents.stop], **settings}


def _is_whole(path: Path) -> bool:
    """Whether all files of an index are there: many clusters remove single files that were not opened for weeks."""
    try:
        names = json.loads((path / DESCRIPTION).read_bytes()).get("files", [])
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return False
    return all((path / name).is_file() for name in names)


def _build_once(path: Path, description: str, build: Callable[[Path], None]) -> None:
    leases = path.with_name(f".{path.name}.building")
    holder = HolderLiveness(leases)
    try:
        while not _is_whole(path):
            leases.mkdir(parents=True, exist_ok=True)
            last = newest_lease(leases)
            if last is None or holder.is_gone(last):
                if owned := _claim(leases, last):
                    # If another process takes this one for dead, both build the same bytes.
                    with BackgroundLease(owned):
                        if path.exists() and not _is_whole(path):
                            remove_folder(path, temporary_beside(path))
                        _publish(path, description, build)
            else:
                time.sleep(POLL_SECONDS)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise HoldfastError(f"cannot write the sample index to {path.parent}: give --data-cache-path") from error
        raise
    shutil.rmtree(leases, ignore_errors=True)


def _publish(path: Path, description: str, build: Callable[[Path], None]) -> None:
    started = time.monotonic()
    try:
        with publish_folder(path) as temporary:
            build(temporary)
            files = sorted(file.name for file in temporary.iterdir())
            (temporary / DESCRIPTION).write_text(json.dumps({**json.loads(description), "files": files}, indent=1))
    except (OSError, HoldfastError):
        # Another process was faster.
        if not _is_whole(path):
            raise
    elapsed = time.monotonic() - started
    if elapsed > LOG_AFTER_SECONDS:
        log(f"built the sample index {path} in {elapsed:,.0f} s")


def _claim(leases: Path, last: Lease | None) -> OwnedLease | None:
    try:
        return claim(leases, last)
    except FileNotFoundError:
        return None  # removed, because the index is there
