"""What this host must provide before ranks start: a memory file system for snapshots and, on node 0, a free port."""

import re
from pathlib import Path

from holdfast.config import Config
from holdfast.system.errors import HoldfastError
from holdfast.train.rendezvous import check_port

MOUNTS = Path("/proc/self/mounts")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def check_host(config: Config) -> list[str]:
    """Raises if the run cannot work on this host; returns warnings for the user."""
    warnings = []
    if config.train.save is None:
        warnings.append("warning: no --save: this run keeps nothing, neither checkpoints nor snapshots nor metrics")
    else:
        warnings += check_memory(config.snapshot.snapshot_dir)
    check_port(config.parallel)
    return warnings


def check_memory(folder: str) -> list[str]:
    """Raises if the snapshot folder does not exist; warns if it is not in memory."""
    if not Path(folder).is_dir():
        raise HoldfastError(
            f"--snapshot-dir {folder} is not a folder: give a memory file system that exists (/dev/shm), or mount a tmpfs there"
        )
    kind = file_system_of(Path(folder))
    if kind in MEMORY_FILE_SYSTEMS:
        return []
    return [
        f"warning: --snapshot-dir {folder} is on {kind}, not in memory (tmpfs): every snapshot is written to that disk"
    ]


def file_system_of(path: Path, table: Path = MOUNTS) -> str:
    """The type of the file system that holds a path, as the kernel names it (ext4, tmpfs, ...)."""
    best, kind = "", "an unknown file system"
    real = str(path.resolve())
    for line in table.read_text(errors="surrogateescape").split("\n")[:-1]:
        point, found = line.split(" ")[1:3]
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point)  # spaces are written as \040
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, found
    return kind
