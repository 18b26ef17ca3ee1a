"""The layout of the cache: folders and names.

    CACHE/HOST-DIGEST/NAME            the file, whole and checked: it gets this name by rename and never changes
    CACHE/HOST-DIGEST/.record.json    what it is: url, name, size, sha256; written before the file appears
    CACHE/HOST-DIGEST/.lease-*        which process downloads it (system/leases.py)
    CACHE/HOST-DIGEST/.*.part         the bytes so far (partial_file.py)

The digest is of the whole URL, so two URLs never share a folder; the name is for people and is always the last component of
a path, without leading dots, so no name from a server or a URL can leave the folder or take one of our own names.
"""

import hashlib
import json
import os
import re
import urllib.parse
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.system.atomic_files import publish_text, rename_into_place

RECORD = ".record.json"
LONGEST_NAME = 180  # bytes; file systems allow 255, and temporary names need room for their additions


def cache_folder(given: Path | str | None = None) -> Path:
    """`given`, else $HOLDFAST_CACHE, else $MEGATRON_CACHE, else the platform's cache folder of the user."""
    chosen = given or os.environ.get("HOLDFAST_CACHE") or os.environ.get("MEGATRON_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("holdfast", appauthor=False))


@dataclass(frozen=True)
class CacheRecord:
    """What a finished download was. It stays when the file is deleted: the next download must have the same bytes."""

    url: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CacheEntry:
    """The folder of one URL in the cache."""

    folder: Path

    def record(self) -> CacheRecord | None:
        try:
            content = json.loads(Path(self.folder, RECORD).read_bytes())
            return CacheRecord(content["url"], content["name"], content["size"], content["sha256"])
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None

    def find(self) -> tuple[Path, CacheRecord] | None:
        """The cached file, if it exists with the size that it had when it was checked."""
        record = self.record()
        if record is None:
            return None
        path = self.folder / safe_name(record.name)
        try:
            return (path, record) if os.stat(path).st_size == record.size else None
        except FileNotFoundError:
            return None

    def publish(self, part: Path, record: CacheRecord) -> Path:
        """Gives the checked and synced bytes of `part` their final name, for which the other processes wait."""
        publish_text(self.folder / RECORD, json.dumps(asdict(record), indent=1) + "\n")
        final = self.folder / record.name
        rename_into_place(part, final)
        return final

    def remove_leftovers(self) -> None:
        """Removes what downloads left beside the finished file. A process that still writes there finds the file afterwards."""
        for name in os.listdir(self.folder):
            if name.startswith(".") and name != RECORD:
                Path(self.folder, name).unlink(missing_ok=True)


def entry_of(cache: Path, url: str) -> CacheEntry:
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    host = urllib.parse.urlsplit(url).hostname or urllib.parse.urlsplit(url).scheme
    return CacheEntry(cache / f"{safe_name(host)}-{digest}")


def without_credentials(url: str) -> str:
    """The URL as it may be shown and stored: `user:password@` does not belong in logs."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def name_in_url(url: str) -> str:
    return safe_name(urllib.parse.unquote(urllib.parse.urlsplit(url).path))


def safe_name(text: str) -> str:
    """The last component of any path, made a valid file name."""
    last = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    clean = re.sub(r"[^\w.+=@,() -]", "_", last).strip(" ").lstrip(".")
    while len(clean.encode()) > LONGEST_NAME:
        clean = clean[1:]  # the suffix names the kind of file
    return clean or "download"
