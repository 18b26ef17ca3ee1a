"""The part: the bytes of a download so far, in a form that another process can continue.

The invariant: `PART.json` describes the bytes in `PART` at every instant, because the part is truncated before its state
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
class DownloadState:
    """The content of `PART.json`."""

    url: str = ""
    validator: str | None = None
    """A strong ETag or a Last-Modified date: the server's file is the same as long as this is."""
    length: int | None = None
    name: str = ""
    """The name of the file at the server, or else in the URL."""
    sha256: str | None = None
    """The whole file's checksum as stated by the source."""
    durable: int = 0
    stitched: bool = False
    """The bytes come from several responses, which may not fit: on a wrong checksum one download from byte 0 is tried."""


class PartialFile:
    """A growing file and the checksum of its content. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state_path = path.with_name(path.name + ".json")
        self.state = DownloadState()
        self.size = 0
        self._hash = hashlib.sha256()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def continue_bytes(self, trust_all: bool, beat: Callable[[], None]) -> None:
        """Continues with the bytes in the file; without `trust_all` only with those that were synced."""
        try:
            self.state = DownloadState(**json.loads(self._state_path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            self.clear()
            return
        size = os.fstat(self._descriptor).st_size
        usable = size if trust_all else min(size, self.state.durable)
        os.ftruncate(self._descriptor, usable)
        while self.size < usable:
            block = os.pread(self._descriptor, BLOCK, self.size)
            self._hash.update(block)
            self.size += len(block)
            beat()
        os.lseek(self._descriptor, usable, os.SEEK_SET)

    def copy_from(self, other: Path, trust_all: bool, beat: Callable[[], None]) -> None:
        """As `continue_bytes`, from a part whose writer may only be stopped and may go on writing to it."""
        state_path = other.with_name(other.name + ".json")
        with suppress(FileNotFoundError), other.open("rb") as source:
            before = state_path.read_bytes()
            while block := source.read(BLOCK):
                write_all(self._descriptor, block)
                beat()
            # The writer may have started over between the two reads; then the state differs.
            if state_path.read_bytes() == before:
                self._state_path.write_bytes(before)
        self.continue_bytes(trust_all, beat)

    def start(self, state: DownloadState) -> None:
        """Truncates the part for a download from the first byte."""
        self.clear()
        self.state = state
        self._write_state()

    def stitch(self) -> None:
        if not self.state.stitched:
            self.state.stitched = True
            self._write_state()

    def append(self, chunk: bytes) -> None:
        write_all(self._descriptor, chunk)
        self._hash.update(chunk)
        self.size += len(chunk)
        if self.size - self.state.durable >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._descriptor)
        self.state.durable = self.size
        if self.state.url:
            self._write_state()

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.size, self.state, self._hash = 0, DownloadState(), hashlib.sha256()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)

    def keep_or_remove(self) -> None:
        """Keeps what the next holder can continue, and nothing else."""
        if self.size:
            self.sync()
        else:
            self.remove()

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_state(self) -> None:
        replace_file(self._state_path, json.dumps(asdict(self.state)).encode())
