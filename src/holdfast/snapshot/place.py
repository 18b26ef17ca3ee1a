"""Where the snapshots of a run lie in memory: one folder per run on a memory file system, and whose it is.

    /dev/shm/holdfast-UID/NAME-0123456789abcdef/
        run.json                              name, run folder, boot
        keeper.lock, keeper.json              who keeps it: a lock that ends with its holder; process and port
        rank-00000.desk                       a rank's desk
        rank-00000-of-00002.PLAN.arena        a rank's memory
        peer-HOST-rank-...arena               a copy held for another node
        requests/                             what has been asked of the keeper

The invariant: the folder's name follows from run name and run folder, so two runs meet in one folder only if both are equal; and
nothing is removed here that another run, user or living process owns.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.errors import HoldfastError
from holdfast.publish import temporary_beside
from holdfast.snapshot.arena import Arena, DamagedError
from holdfast.snapshot.desk import Desk

MEMORY = "/dev/shm"
STALE_SECONDS = 24 * 3600.0
ARENA_FILE = re.compile(r"rank-(\d{5})-of-(\d{5})\.([0-9a-f]{8})\.arena")
PEER_FILE = re.compile(r"peer-(?P<node>.+)-rank-(\d{5})-of-(\d{5})\.([0-9a-f]{8})\.arena")


def user_folder(memory: Path | str = MEMORY) -> Path:
    return Path(memory) / f"holdfast-{os.getuid()}"


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Place:
    """A run's folder in memory."""

    path: Path
    name: str
    folder: Path

    @classmethod
    def of(cls, name: str, folder: Path | str, memory: Path | str = MEMORY) -> "Place":
        real = Path(folder).resolve()
        key = hashlib.sha256(f"{name}\0{real}".encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
        return cls(user_folder(memory) / f"{readable}-{key}", name, real)

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.name}\0{self.folder}".encode()).hexdigest()[:32]

    @property
    def node(self) -> str:
        """This place among the places of a run on other machines (or, in a test, in other folders of this one)."""
        return f"{socket.gethostname()}:{self.path.parent}"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    def make(self) -> None:
        self.requests.mkdir(parents=True, exist_ok=True, mode=0o700)
        record = {"name": self.name, "folder": str(self.folder), "boot": boot_id(), "created": time.time()}
        if not (self.path / "run.json").exists():
            write_json(self.path / "run.json", record)

    def arenas(self) -> list[Path]:
        """The arenas of this node's own ranks."""
        return sorted(entry for entry in _entries(self.path) if ARENA_FILE.fullmatch(entry.name))

    def peer_arenas(self) -> list[Path]:
        """Copies held for other nodes."""
        return sorted(entry for entry in _entries(self.path) if PEER_FILE.fullmatch(entry.name))

    def desks(self) -> dict[int, Desk]:
        return {int(entry.name[5:10]): Desk(entry) for entry in sorted(_entries(self.path)) if entry.suffix == ".desk"}

    def memory_bytes(self) -> int:
        return sum(entry.stat().st_blocks * 512 for entry in _entries(self.path) if entry.is_file())


def open_arenas(paths: list[Path], run: str) -> list[Arena]:
    """The arenas that can be read and belong to the run; the others are left alone."""
    found = []
    for path in paths:
        try:
            arena = Arena(path)
        except (DamagedError, FileNotFoundError):
            continue
        if arena.run == run:
            found.append(arena)
        else:
            arena.close()
    return found


def places(memory: Path | str = MEMORY) -> list[Place]:
    """Every run of this user that holds memory here."""
    found = []
    for entry in sorted(_entries(user_folder(memory))):
        record = read_json(entry / "run.json")
        if record:
            found.append(Place(entry, record["name"], Path(record["folder"])))
    return found


def find_place(run: str, memory: Path | str = MEMORY) -> Place:
    """The run of this name or with this run folder; an unclear or unknown name is an error that lists what there is."""
    all_places = places(memory)
    matches = [p for p in all_places if p.name == run or p.folder == Path(run).resolve()]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(f"{p.name} ({p.folder})" for p in (matches or all_places)) or "none"
    what = "several runs are called" if matches else "no memory is held for a run called"
    raise HoldfastError(f"{what} {run}; held here: {names}")


def remove_stale(memory: Path | str, keep: Place) -> list[str]:
    """Frees what dead runs left behind: nobody keeps or uses it, and it is of another boot or a day old."""
    removed = []
    for place in places(memory):
        if place.path == keep.path or keeper_alive(place) or any(desk.occupied() for desk in place.desks().values()):
            continue
        record = read_json(place.path / "run.json") or {}
        newest = max((entry.stat().st_mtime for entry in _entries(place.path)), default=0.0)
        if record.get("boot") != boot_id() or time.time() - newest > STALE_SECONDS:
            shutil.rmtree(place.path, ignore_errors=True)
            removed.append(place.name)
    return removed


def lock_keeper(place: Place, create: bool = True) -> int | None:
    """Becomes the keeper: a descriptor to hold for as long; None if there is one."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(place.path / "keeper.lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise HoldfastError(
            f"cannot lock {place.path}: {error.strerror}; snapshots need a folder with flock, such as {MEMORY}"
        ) from error
    return descriptor


def keeper_alive(place: Place) -> bool:
    try:
        # creating nothing: a look must not leave a file in a folder that its keeper is just removing
        descriptor = lock_keeper(place, create=False)
    except FileNotFoundError:
        return False
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def write_json(path: Path, record: Any) -> None:
    """Appears by rename; memory needs no fsync."""
    temporary = temporary_beside(path)
    temporary.write_bytes(orjson.dumps(record))
    os.rename(temporary, path)


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
