"""What a run of `preprocess` has done so far, on disk: PREFIX.preprocessing/ beside the final names.

    settings.json          what is being made of what; another run must want the same to go on
    journal.jsonl          a line per finished part, and the state after each part that was appended
    0.bin 0.lengths 0.documents    (one set per key) the dataset as far as it is appended, in the order of the input
    bad.jsonl              bad lines met so far
    parts/                 finished parts that wait for an earlier one

The invariant: after a kill at any instant, the last state in the journal, with the files cut to the sizes it names, is a whole
prefix of the result. After a power cut the same holds for the last state that was synced.
"""

import fcntl
import functools
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from holdfast.data.append import append_file, begin_to_sync, write_all
from holdfast.data.indexed import IndexPart, write_index
from holdfast.data.worker import Part, part_path
from holdfast.errors import HoldfastError
from holdfast.journal import Journal, read_journal
from holdfast.publish import explain_os_error, publish_bytes

SYNC_SECONDS = 30.0
STRETCH_BYTES = 32 << 20


@dataclass
class KeyState:
    """How far the files of one key have grown."""

    bytes: int = 0
    sequences: int = 0
    documents: int = 0


@dataclass
class State:
    """Where the run stands, after the units before `next_unit`."""

    next_unit: int = 0
    keys: list[KeyState] = field(default_factory=list)
    file: int = -1
    line: int = 0
    offset: int = 0
    """Lines and bytes of the current file that are behind us."""
    lines: int = 0
    size: int = 0
    bad: int = 0
    bad_bytes: int = 0
    digest: str = ""
    """Digest of the current file's units' digests."""
    seconds: float = 0.0
    complete: bool = False
    boot: str = ""
    synced: bool = False

    @property
    def documents(self) -> int:
        return self.keys[0].documents


@functools.cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Workspace:
    """Opened by one process at a time; a second one is refused."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], keys: int, itemsize: int, *, overwrite: bool) -> None:
        self._started = self._last_sync = time.monotonic()
        self.folder, self._itemsize = folder, itemsize
        self.parts = folder / "parts"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise explain_os_error(error, folder) from error
        self._take_lock()
        try:
            resumed = self._same_settings(settings, overwrite)
            self.parts.mkdir(exist_ok=True)
            self.state = State(keys=[KeyState() for _ in range(keys)])
            self.waiting: dict[int, Part] = {}
            self.digests: dict[int, str] = {}
            if resumed:
                self._resume()
            else:
                publish_bytes(folder / "settings.json", orjson.dumps(dict(settings), option=orjson.OPT_INDENT_2))
            self._journal = Journal(folder / "journal.jsonl")
            self._open()
        except OSError as error:
            os.close(self._lock)
            raise explain_os_error(error, folder) from error
        except BaseException:
            os.close(self._lock)
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A run that has just finished removed the folder with the lock we hold: it is nobody's then.
            if os.stat(self.folder / "lock").st_ino == os.fstat(self._lock).st_ino:
                return
        except OSError:
            pass
        os.close(self._lock)
        raise HoldfastError(f"another process is preprocessing to this prefix right now ({self.folder} is locked)")

    def _same_settings(self, settings: Mapping[str, Any], overwrite: bool) -> bool:
        """True when an earlier run wanted the same; what another run left is removed only on request."""
        path = self.folder / "settings.json"
        if not path.exists():
            self._clear()
            return False
        try:
            before = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError:
            before = {}
        wanted = orjson.loads(orjson.dumps(dict(settings)))
        if before == wanted:
            return True
        if not overwrite:
            changed = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
            raise HoldfastError(
                f"{self.folder} holds an unfinished run with other settings ({', '.join(changed)} differ); "
                "repeat that run to finish it, or start over with --overwrite"
            )
        self._clear()
        return False

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def _resume(self) -> None:
        rebooted = False
        parts: dict[int, Part] = {}
        for record in read_journal(self.folder / "journal.jsonl"):
            if "part" in record:
                part = Part(**record["part"])
                part.bad = [(line, offset, reason) for line, offset, reason in part.bad]
                parts[part.unit] = part
            elif "digest" in record:
                self.digests[record["file"]] = record["digest"]
            elif "state" in record:
                state = State(**record["state"])
                state.keys = [KeyState(**key) for key in record["state"]["keys"]]
                rebooted = rebooted or state.boot != boot_id()
                if not rebooted or state.synced:
                    self.state = state
        if not rebooted:
            self.waiting = {
                number: part
                for number, part in parts.items()
                if number >= self.state.next_unit and self._is_whole(part)
            }

    def _is_whole(self, part: Part) -> bool:
        for key, (tokens, sequences) in enumerate(zip(part.tokens, part.sequences, strict=True)):
            path = part_path(self.parts, part.unit, key)
            expected = tokens * self._itemsize + 4 * sequences + 8 * part.documents
            if not path.is_file() or path.stat().st_size != expected:
                return False
        return True

    def _open(self) -> None:
        """Opens the growing files, cut to the sizes of the state."""
        self._files: list[tuple[int, int, int]] = []
        for key, state in enumerate(self.state.keys):
            sizes = (state.bytes, 4 * state.sequences, 8 * state.documents)
            names = (f"{key}.bin", f"{key}.lengths", f"{key}.documents")
            descriptors = [self._open_at(name, size) for name, size in zip(names, sizes, strict=True)]
            self._files.append((descriptors[0], descriptors[1], descriptors[2]))
        self._bad = self._open_at("bad.jsonl", self.state.bad_bytes)

    def _open_at(self, name: str, size: int) -> int:
        if self.state.complete and not (self.folder / name).exists():
            return -1  # it already has its final name
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(descriptor).st_size < size:
            raise HoldfastError(f"{self.folder / name} is shorter than the journal says; start over with --overwrite")
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor

    def wants(self, unit: int) -> bool:
        """Whether the unit is still to be done."""
        return unit >= self.state.next_unit and unit not in self.waiting

    def add(self, part: Part) -> None:
        """Takes note of a finished part; it is kept from now on."""
        self.waiting[part.unit] = part
        if part.unit != self.state.next_unit:
            self._journal.write({"part": asdict(part)})

    def next_part(self) -> Part | None:
        """The part whose turn it is, once it is there."""
        return self.waiting.get(self.state.next_unit)

    def append(self, part: Part, bad_lines: bytes) -> None:
        """Makes the part the end of the dataset."""
        state = self.state
        for key, (tokens, lengths, documents) in enumerate(self._files):
            source = part_path(self.parts, part.unit, key)
            key_state = state.keys[key]
            size = part.tokens[key] * self._itemsize
            with source.open("rb") as file:
                append_file(file.fileno(), 0, tokens, size)
                file.seek(size)
                write_all(lengths, file.read(4 * part.sequences[key]))
                ends = np.frombuffer(file.read(), "<i8") + key_state.sequences
            write_all(documents, ends.astype("<i8").tobytes())
            stretch = key_state.bytes // STRETCH_BYTES
            key_state.bytes += size
            if stretch < key_state.bytes // STRETCH_BYTES:
                begin_to_sync(tokens, stretch * STRETCH_BYTES, STRETCH_BYTES)
            key_state.sequences += part.sequences[key]
            key_state.documents += part.documents
        write_all(self._bad, bad_lines)
        if part.file != state.file:
            self._end_file()
            state.file, state.line, state.offset, state.digest = part.file, 0, 0, ""
        state.bad_bytes += len(bad_lines)
        state.bad += len(part.bad)
        state.line, state.offset = state.line + part.lines, state.offset + part.size
        state.lines, state.size = state.lines + part.lines, state.size + part.size
        if part.digest:
            state.digest = xxhash.xxh3_128_hexdigest((state.digest + part.digest).encode())
        state.next_unit = part.unit + 1
        self._note()
        for key in range(len(self._files)):
            part_path(self.parts, part.unit, key).unlink()
        del self.waiting[part.unit]

    def _end_file(self) -> None:
        if self.state.digest:
            self.digests[self.state.file] = self.state.digest
            self._journal.write({"file": self.state.file, "digest": self.state.digest})

    def _note(self) -> None:
        """Writes the state to the journal, now and then after syncing what it speaks of."""
        now = time.monotonic()
        self.state.synced = self.state.complete or now - self._last_sync > SYNC_SECONDS
        if self.state.synced:
            for descriptor in (*(one for files in self._files for one in files), self._bad):
                if descriptor >= 0:
                    os.fdatasync(descriptor)
            self._last_sync = now
        self.state.seconds += now - self._started
        self._started = now
        self.state.boot = boot_id()
        self._journal.write({"state": asdict(self.state)})

    def finish(self, dtype: np.dtype[Any]) -> list[tuple[Path, Path]]:
        """Writes the indices; the pairs are ready for their final names. Can be repeated."""
        pairs = []
        for key, state in enumerate(self.state.keys):
            bin_file, idx_file = self.folder / f"{key}.bin", self.folder / f"{key}.idx"
            lengths = _mapped(self.folder / f"{key}.lengths", "<i4", state.sequences)
            documents = _mapped(self.folder / f"{key}.documents", "<i8", state.documents)
            write_index(idx_file, dtype, [IndexPart(lengths, documents)])
            pairs.append((bin_file, idx_file))
        self._end_file()
        self.state.complete = True
        self._note()
        return pairs

    def close(self, *, remove: bool = False) -> None:
        for descriptor in (*(one for files in self._files for one in files), self._bad):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal.close()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _mapped(path: Path, dtype: str, count: int) -> Any:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
