"""The bytes of a download so far, in a form that another process can continue.

The invariant: `PART.json` describes the bytes in `PART` at every instant, because the part is emptied before its description
changes, and a byte is in the file before it is counted. After a kill -9 all counted bytes are good (the kernel has them);
after a crash of the machine, or seen from another machine, only those up to `durable` are, which were synced.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.system.atomic_files import replace_file
from holdfast.system.descriptors import write_all

BLOCK = 1 << 20
SYNC_EVERY = 64 << 20


@dataclass
class Description:
    url: str = ""
    validator: str | None = None
    """A strong ETag or a Last-Modified date: the server's file is the same as long as this is."""
    length: int | None = None
    name: str = ""
    """What the server, or else the URL, calls the file."""
    sha256: str | None = None
    """What the source says the whole file's checksum is."""
    durable: int = 0
    stitched: bool = False
    """The bytes came in several responses, so a wrong checksum may be the seam's fault: worth one start from zero."""


class Part:
    """A growing file and the checksum of what is in it. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._description_path = path.with_name(path.name + ".json")
        self.about = Description()
        self.size = 0
        self._hash = hashlib.sha256()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def continue_bytes(self, trust_all: bool, beat: Callable[[], None]) -> None:
        """Takes over what is in the file; without `trust_all` only what was synced."""
        try:
            self.about = Description(**json.loads(self._description_path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            self.clear()
            return
        size = os.fstat(self._descriptor).st_size
        usable = size if trust_all else min(size, self.about.durable)
        os.ftruncate(self._descriptor, usable)
        while self.size < usable:
            block = os.pread(self._descriptor, BLOCK, self.size)
            self._hash.update(block)
            self.size += len(block)
            beat()
        os.lseek(self._descriptor, usable, os.SEEK_SET)

    def copy_from(self, other: Path, trust_all: bool, beat: Callable[[], None]) -> None:
        """As `continue_bytes`, from a part whose writer may only be asleep and may go on writing to it."""
        description = other.with_name(other.name + ".json")
        with suppress(FileNotFoundError), other.open("rb") as source:
            about = description.read_bytes()
            while block := source.read(BLOCK):
                write_all(self._descriptor, block)
                beat()
            # The sleeper may have started over between the two reads; then the description is another one.
            if description.read_bytes() == about:
                self._description_path.write_bytes(about)
        self.continue_bytes(trust_all, beat)

    def start(self, about: Description) -> None:
        """Empties the part for a file from its first byte."""
        self.clear()
        self.about = about
        self._write_description()

    def stitch(self) -> None:
        if not self.about.stitched:
            self.about.stitched = True
            self._write_description()

    def append(self, chunk: bytes) -> None:
        write_all(self._descriptor, chunk)
        self._hash.update(chunk)
        self.size += len(chunk)
        if self.size - self.about.durable >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._descriptor)
        self.about.durable = self.size
        if self.about.url:
            self._write_description()

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.size, self.about, self._hash = 0, Description(), hashlib.sha256()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._description_path.unlink(missing_ok=True)

    def keep_or_remove(self) -> None:
        """Leaves what the next holder can continue, and nothing else."""
        if self.size:
            self.sync()
        else:
            self.remove()

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_description(self) -> None:
        replace_file(self._description_path, json.dumps(asdict(self.about)).encode())
