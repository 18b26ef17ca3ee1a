"""The memory of a run: one folder per run on a memory file system, its owner, its locks and its clean-up.

    /dev/shm/holdfast-UID/NAME-0123456789abcdef/
        run.json                              name, run folder, boot
        keeper.lock, keeper.json              the keeper's lock, which ends with its process; its process number
        keeper.status                         the keeper's heartbeat and last error
        rank-00000.status                     a rank's status page
        rank-00000-of-00002.PLAN.arena        a rank's memory
        peer-HOST-rank-...arena               a copy held for another node
        requests/                             requests to the keeper

Beside it, `.NAME-0123456789abcdef.lock` is locked while the memory is claimed by ranks or freed.

The invariant: the folder's name is a function of run name and run folder, so two runs share a folder only if both are equal;
every folder belongs to this user, who alone may enter it; nothing is removed here that another run, user or live process
owns; and no decision depends on the wall clock or on a file's time.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.slot import DamagedError
from holdfast.snapshot.ranks.status_page import RankStatus
from holdfast.system.atomic_files import remove_folder, replace_file
from holdfast.system.descriptors import open_private
from holdfast.system.errors import HoldfastError
from holdfast.system.processes import boot_id, start_time

MEMORY = "/dev/shm"
STALE_SECONDS = 24 * 3600.0
LOCK_SECONDS = 60.0
SERVE = "serve"
"""a file in the run's memory while other nodes restore from this one"""
ARENA_FILE = re.compile(r"rank-(\d{5})-of-(\d{5})\.([0-9a-f]{8})\.arena")
PEER_FILE = re.compile(r"peer-(?P<node>.+)-rank-(\d{5})-of-(\d{5})\.([0-9a-f]{8})\.arena")

TEMPORARY_FILE = re.compile(
    r"\..+\.([0-9a-f]{16}-)?(?P<process>\d+)(-\d+-[0-9a-f]{8})?\.tmp|pulled-(?P<puller>\d+)-[0-9a-f]+\.arena"
)


def user_folder(memory: Path | str = MEMORY) -> Path:
    # Absolute: the keeper has another working directory.
    return Path(memory).absolute() / f"holdfast-{os.getuid()}"


@dataclass(frozen=True)
class RunMemory:
    """A run's folder in memory."""

    path: Path
    name: str
    folder: Path

    @classmethod
    def of(cls, name: str, folder: Path | str, memory: Path | str = MEMORY) -> "RunMemory":
        real = Path(folder).resolve()
        key = hashlib.sha256(f"{name}\0{real}".encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
        return cls(user_folder(memory) / f"{readable}-{key}", name, real)

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.name}\0{self.folder}".encode()).hexdigest()[:32]

    @property
    def node(self) -> str:
        """The name of this node within the run: its host, and the folder, because tests have several nodes on one host."""
        return f"{socket.gethostname()}:{self.path.parent}"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    def make(self) -> None:
        memory = self.path.parent.parent
        if not memory.is_dir():
            raise HoldfastError(f"{memory} does not exist; give a memory file system such as {MEMORY} (--snapshot-dir)")
        for folder in (self.path.parent, self.path, self.requests):
            make_private_folder(folder)
        record = {"name": self.name, "folder": str(self.folder), "boot": boot_id(), "created": time.time()}
        if not (self.path / "run.json").exists():
            write_json(self.path / "run.json", record)

    @contextmanager
    def locked(self, wait: bool = True) -> Iterator[bool]:
        """Holds the lock for claiming or freeing this memory; yields False if another process has it and `wait` is False."""
        make_private_folder(self.path.parent)
        descriptor = _lock_file(self.path.parent / f".{self.path.name}.lock", wait)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def free(self) -> None:
        """Removes the memory; the caller holds the lock."""
        freed = self.path.with_name(f".{self.path.name}.freed")
        shutil.rmtree(freed, ignore_errors=True)
        remove_folder(self.path, freed)  # a run that starts now makes a folder of its own
        (self.path.parent / f".{self.path.name}.lock").unlink(missing_ok=True)

    def arenas(self) -> list[Path]:
        """The arenas of this node's own ranks."""
        return sorted(entry for entry in _entries(self.path) if ARENA_FILE.fullmatch(entry.name))

    def peer_arenas(self) -> list[Path]:
        """Copies held for other nodes."""
        return sorted(entry for entry in _entries(self.path) if PEER_FILE.fullmatch(entry.name))

    def pages(self) -> dict[int, RankStatus]:
        """The status page of each rank of this node."""
        found: dict[int, RankStatus] = {}
        for entry in sorted(entry for entry in _entries(self.path) if entry.match("rank-*.status")):
            with suppress(FileNotFoundError):  # freed meanwhile
                found[int(entry.name[5:10])] = RankStatus(entry)
        return found

    def memory_bytes(self) -> int:
        used = 0
        for entry in filter(Path.is_file, _entries(self.path)):
            with suppress(FileNotFoundError):  # a temporary file, or freed meanwhile
                used += entry.stat().st_blocks * 512
        return used


@contextmanager
def opened_arenas(
    paths: list[Path], run: str, on_damage: Callable[[str], None] = lambda message: None
) -> Iterator[list[Arena]]:
    """The arenas that can be read and belong to the run; `on_damage` is called with a message for each damaged one.
    They are closed at the end of the block."""
    with ExitStack() as stack:
        found = []
        for path in paths:
            try:
                arena = stack.enter_context(closing(Arena(path)))
            except FileNotFoundError:
                continue
            except (DamagedError, OSError) as error:
                on_damage(str(error))
                continue
            if arena.run == run:
                found.append(arena)
        yield found


def run_memories(memory: Path | str = MEMORY) -> list[RunMemory]:
    """Every run of this user that holds memory here."""
    found = []
    for entry in sorted(_entries(user_folder(memory))):
        record = read_json(entry / "run.json")
        name, folder = (record.get("name"), record.get("folder")) if isinstance(record, dict) else (None, None)
        if isinstance(name, str) and isinstance(folder, str):  # a damaged record must not hide the other runs
            found.append(RunMemory(entry, name, Path(folder)))
    return found


def find_run_memory(run: str, memory: Path | str = MEMORY) -> RunMemory:
    """The run of this name or run folder; an ambiguous or unknown name is an error that lists the runs in memory."""
    known = run_memories(memory)
    matches = [p for p in known if p.name == run or p.folder == Path(run).resolve()]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(f"{p.name} ({p.folder})" for p in (matches or known)) or "none"
    what = "several runs are called" if matches else "no memory is held for a run called"
    raise HoldfastError(f"{what} {run}; held here: {names}")


def remove_stale(memory: Path | str, keep: RunMemory) -> list[str]:
    """Frees the memory of dead runs, and returns their names: no process keeps or uses it, and it is of another boot, or the
    last heartbeat of a rank is a day old. What a killed keeper was freeing is removed at once."""
    removed = []
    for entry in _entries(user_folder(memory)):
        if entry.name.startswith(".") and entry.suffix == ".freed":
            shutil.rmtree(entry, ignore_errors=True)
    for run_memory in run_memories(memory):
        if run_memory.path == keep.path:
            continue
        with run_memory.locked(wait=False) as locked:
            if locked and _is_stale(run_memory):
                run_memory.free()
                removed.append(run_memory.name)
    return removed


def remove_dead_temporaries(run_memory: RunMemory) -> None:
    """Removes the arenas and records without a final name of ranks that were killed while they started."""
    for entry in _entries(run_memory.path) + _entries(run_memory.requests):
        match = TEMPORARY_FILE.fullmatch(entry.name)
        if match and not start_time(int(match["process"] or match["puller"])):
            entry.unlink(missing_ok=True)


def _is_stale(run_memory: RunMemory) -> bool:
    record = read_json(run_memory.path / "run.json")
    pages = run_memory.pages().values()
    if record is None or keeper_alive(run_memory) or any(page.owner_alive() for page in pages):
        return False
    return record.get("boot") != boot_id() or min((page.age for page in pages), default=0.0) > STALE_SECONDS


def make_private_folder(path: Path) -> None:
    """Makes a folder that this user alone may enter. A folder of another user, or a link, is refused: its owner decides what is
    in it."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise HoldfastError(
            f"{path} is not a folder of this user (its owner has uid {status.st_uid}): another user may have made it to read or "
            "change snapshots. Remove it, or choose another --snapshot-dir"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.chmod(path, 0o700)


def _lock_file(path: Path, wait: bool) -> int | None:
    """A descriptor that holds the lock of this file; the lock ends with the descriptor."""
    deadline = time.monotonic() + (LOCK_SECONDS if wait else 0.0)
    while True:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor  # else its holder has removed it, and the next one locks a new file
        except BlockingIOError:
            pass
        os.close(descriptor)
        if time.monotonic() > deadline:
            if wait:
                raise HoldfastError(
                    f"{path} was locked by another process for {LOCK_SECONDS:.0f} s; check whether that process is stopped"
                )
            return None
        time.sleep(0.01)


# struct flock of Linux: type, whence, start, length, process
_FLOCK = struct.Struct("hhqqi4x")


def lock_keeper(run_memory: RunMemory) -> int | None:
    """Becomes the keeper: a descriptor that holds the lock; None if another process has it."""
    descriptor = open_private(run_memory.path / "keeper.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise HoldfastError(
            f"cannot lock {run_memory.path}: {error.strerror}; snapshots need a file system with file locks, such as {MEMORY}"
        ) from error
    return descriptor


def keeper_alive(run_memory: RunMemory) -> bool:
    """Whether a process holds the keeper's lock. It only queries the lock: taking it could keep a new keeper from starting."""
    try:
        descriptor = open_private(run_memory.path / "keeper.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        asked = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)


def write_json(path: Path, record: Any) -> None:
    """Writes a file that appears by rename, readable by its owner alone; memory needs no fsync."""
    replace_file(path, orjson.dumps(record), opener=open_private)


def read_json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, orjson.JSONDecodeError):
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
