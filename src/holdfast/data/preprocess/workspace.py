"""What a run of `preprocess` has done so far, on disk: PREFIX.preprocessing/ beside the final names.

    settings.json          what decides the result; only a call with the same settings continues the run
    journal.jsonl          a line per finished part, and the state after each part that was appended
    0.bin 0.lengths 0.documents    (one set per key) the dataset as far as it is appended, in the order of the input
    bad.jsonl              bad lines found so far
    parts/                 finished parts that wait for an earlier one

The invariant: after a kill at any instant, the last state in the journal, with the files cut to the sizes it names, is a whole
prefix of the result. After a power cut the same holds for the last state that was synced.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from holdfast.data.append_file import append_file, start_writeback
from holdfast.data.indexed import IndexPart, write_index
from holdfast.data.preprocess.history import AppendState, History, KeyState, chain_digest, read_history, same_files
from holdfast.data.preprocess.worker import EncodedPart, part_path
from holdfast.system.atomic_files import explain_os_error, publish_bytes
from holdfast.system.descriptors import write_all
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from holdfast.system.leases import PREFIX as LEASE_PREFIX
from holdfast.system.leases import OwnedLease, claim, newest_lease
from holdfast.system.processes import boot_id

SYNC_SECONDS = 30.0
STRETCH_BYTES = 32 << 20
LOCK, SETTINGS, JOURNAL = "lock", "settings.json", "journal.jsonl"
LOCK_ATTEMPTS = 10

KeepUnchanged = Callable[[History, Mapping[str, Any], Mapping[str, Any]], History]
"""What stays valid of a history made with the first settings, under the second ones, whose input files have other content."""


class Workspace:
    """Opened by one process at a time; a second one is refused."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        keys: int,
        itemsize: int,
        *,
        overwrite: bool,
        keep_unchanged: KeepUnchanged,
    ) -> None:
        self._started = self._last_sync = time.monotonic()
        self.folder, self._itemsize = folder, itemsize
        self.parts = folder / "parts"
        self._lock = -1
        self._lease: OwnedLease | None = None
        try:
            self._take_lock()
            history = self._continue(orjson.loads(orjson.dumps(dict(settings))), overwrite, keep_unchanged)
            self.parts.mkdir(exist_ok=True)
            self.state = history.states[-1] if history.states else AppendState(keys=[KeyState() for _ in range(keys)])
            self.waiting = {number: part for number, part in history.parts.items() if self._is_whole(part)}
            self.digests = history.digests
            self._journal = Journal(folder / JOURNAL)
            self._open()
        except OSError as error:
            self._unlock()
            raise explain_os_error(error, folder) from error
        except BaseException:
            self._unlock()
            raise

    def _take_lock(self) -> None:
        for _ in range(LOCK_ATTEMPTS):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HoldfastError(
                    f"another process is preprocessing to this prefix right now ({self.folder} is locked)"
                ) from None
            except OSError:
                # A file system without flock, for example Lustre mounted without it (ENOSYS), or NFS without a lock server.
                self._take_lease()
            with contextlib.suppress(FileNotFoundError):
                # A run that has just finished removed the folder with the lock we hold; then nothing excludes us from others.
                if os.stat(self.folder / LOCK).st_ino == os.fstat(self._lock).st_ino:
                    return
            self._unlock()
        raise HoldfastError(
            f"cannot lock {self.folder}: other processes keep removing it; run the command again when they have ended"
        )

    def _take_lease(self) -> None:
        newest = newest_lease(self.folder)
        free = newest is None or newest.has_ended()
        self._lease = claim(self.folder, newest) if free else None
        if self._lease is None:
            holder = newest or newest_lease(self.folder)
            raise HoldfastError(
                f"{holder.describe() if holder else 'another process'} is preprocessing to this prefix; "
                f"this file system has no flock, so if that process is gone, remove {self.folder}/.lease-*"
            )

    def _unlock(self) -> None:
        if self._lease is not None:
            self._lease.release()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _continue(self, wanted: dict[str, Any], overwrite: bool, keep_unchanged: KeepUnchanged) -> History:
        """What an earlier run has done of the same work; what was left of another work is removed only on request."""
        before, history = self._settings_before(), read_history(self.folder / JOURNAL)
        changed = sorted(name for name in {*before, *wanted} - {"unit_bytes"} if before.get(name) != wanted.get(name))
        if any(file["path"] == "-" for file in wanted["inputs"]):
            changed, overwrite = ["inputs"], True  # standard input cannot be read again
        if short := self._short_file(history):
            if not overwrite:
                raise HoldfastError(f"{short} is shorter than the journal records; start over with --overwrite")
            changed = [short.name]
        complete = bool(history.states) and history.states[-1].complete
        if not changed or (
            not overwrite and not complete and {*changed} <= {"inputs", "cuts"} and same_files(before, wanted)
        ):
            # The units are those of the run that began the work; any size gives the same dataset.
            wanted["unit_bytes"] = before["unit_bytes"]
        elif history.states and history.states[-1].documents and not overwrite:
            raise HoldfastError(
                f"{self.folder} holds an unfinished run with other settings ({', '.join(changed)} differ); "
                "repeat that run to finish it, or start over with --overwrite"
            )
        else:
            self._clear()
            history = History()
        if changed:
            history = keep_unchanged(history, before, wanted)
            # What is kept is true of both inputs: a kill between the two writes does no harm.
            publish_bytes(self.folder / JOURNAL, history.to_journal())
            publish_bytes(self.folder / SETTINGS, orjson.dumps(wanted, option=orjson.OPT_INDENT_2))
        self.unit_bytes: int = wanted["unit_bytes"]
        return history

    def _settings_before(self) -> dict[str, Any]:
        try:
            content = orjson.loads((self.folder / SETTINGS).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return {}
        return content if isinstance(content, dict) else {}

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK and not entry.name.startswith(LEASE_PREFIX):
                entry.unlink()

    def _is_whole(self, part: EncodedPart) -> bool:
        for key, (tokens, sequences) in enumerate(zip(part.tokens, part.sequences, strict=True)):
            path = part_path(self.parts, part.unit, key)
            expected = tokens * self._itemsize + 4 * sequences + 8 * part.documents
            if not path.is_file() or path.stat().st_size != expected:
                return False
        return True

    def _short_file(self, history: History) -> Path | None:
        """A file that holds less than the last state says, for example after a repair of the file system."""
        for name, size in _sizes(history.states[-1]).items() if history.states else ():
            path = self.folder / name
            if path.exists():
                if path.stat().st_size < size:
                    return path
            elif size and not history.states[-1].complete:
                return path
        return None

    def _open(self) -> None:
        """Opens the growing files, cut to the sizes of the state."""
        opened = {name: self._open_at(name, size) for name, size in _sizes(self.state).items()}
        *files, self._bad = opened.values()
        self._files = list(zip(files[0::3], files[1::3], files[2::3], strict=True))

    def _open_at(self, name: str, size: int) -> int:
        if self.state.complete and not (self.folder / name).exists():
            return -1  # it already has its final name
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor

    def is_missing(self, unit: int) -> bool:
        """Whether the unit is still to be done."""
        return unit >= self.state.next_unit and unit not in self.waiting

    def add(self, part: EncodedPart) -> None:
        """Records a finished part; a later run keeps it."""
        self.waiting[part.unit] = part
        if part.unit != self.state.next_unit:
            self._journal.write({"part": asdict(part)})

    def next_part(self) -> EncodedPart | None:
        """The next part to append, if it is finished."""
        return self.waiting.get(self.state.next_unit)

    def append(self, part: EncodedPart, bad_lines: bytes) -> None:
        """Makes the part the end of the dataset."""
        state = self.state
        for key, (tokens, lengths, documents) in enumerate(self._files):
            source = part_path(self.parts, part.unit, key)
            key_state = state.keys[key]
            size = part.tokens[key] * self._itemsize
            with source.open("rb") as file:
                append_file(file.fileno(), tokens, size)
                file.seek(size)
                write_all(lengths, file.read(4 * part.sequences[key]))
                ends = np.frombuffer(file.read(), "<i8") + key_state.sequences
            write_all(documents, ends.astype("<i8").tobytes())
            stretch = key_state.bytes // STRETCH_BYTES
            key_state.bytes += size
            if stretch < key_state.bytes // STRETCH_BYTES:
                start_writeback(tokens, stretch * STRETCH_BYTES, STRETCH_BYTES)
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
            state.digest = chain_digest(state.digest, part.digest)
        state.next_unit = part.unit + 1
        self._write_state()
        for key in range(len(self._files)):
            part_path(self.parts, part.unit, key).unlink()
        del self.waiting[part.unit]

    def _end_file(self) -> None:
        if self.state.digest:
            self.digests[self.state.file] = self.state.digest
            self._journal.write({"file": self.state.file, "digest": self.state.digest})

    def _write_state(self) -> None:
        """Writes the state to the journal, now and then after syncing the files it describes."""
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
        self._write_state()
        return pairs

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been done that a later run could go on from."""
        return not self.state.documents and not self.waiting.keys() - {self.state.next_unit}

    def close(self, *, remove: bool = False) -> None:
        for descriptor in (*(one for files in self._files for one in files), self._bad):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal.close()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()


def _sizes(state: AppendState) -> dict[str, int]:
    """The growing files and their sizes: three for each key, and the bad lines."""
    sizes: dict[str, int] = {}
    for key, one in enumerate(state.keys):
        sizes |= {f"{key}.bin": one.bytes, f"{key}.lengths": 4 * one.sequences, f"{key}.documents": 8 * one.documents}
    return {**sizes, "bad.jsonl": state.bad_bytes}


def _mapped(path: Path, dtype: str, count: int) -> Any:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
