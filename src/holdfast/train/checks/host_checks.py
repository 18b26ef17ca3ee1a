"""What this host must offer before ranks start: a memory file system for the snapshots and, on node 0, a free port."""

import errno
import os
import socket
from pathlib import Path

from holdfast.config import Config, ParallelConfig
from holdfast.system.errors import HoldfastError, UsageError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def check_host(config: Config) -> list[str]:
    """Raises what cannot work on this host; returns warnings for the user."""
    warnings = []
    if config.train.save is None:
        warnings.append("warning: no --save: this run keeps nothing, neither checkpoints nor snapshots nor metrics")
    else:
        warnings += check_memory(config.snapshot.snapshot_dir)
    check_port(config.parallel)
    return warnings


def check_memory(folder: str) -> list[str]:
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


def file_system_of(path: Path) -> str:
    """The type of the file system that holds a path, as the kernel names it (ext4, tmpfs, ...)."""
    best, kind = "", "an unknown file system"
    real = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point, found = line.split()[1:3]
        point = point.encode().decode("unicode_escape")  # spaces are written as \040
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, found
    return kind


def endpoint_of(parallel: ParallelConfig) -> tuple[str, int] | None:
    """Host and port of --rdzv-endpoint; None where one node picks a free port itself."""
    if parallel.rdzv_endpoint is None:
        if parallel.nnodes > 1:
            raise UsageError(f"--nnodes {parallel.nnodes} needs --rdzv-endpoint HOST:PORT, HOST being node 0")
        return None
    host, _, port = parallel.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--rdzv-endpoint {parallel.rdzv_endpoint} is not HOST:PORT, for example node0:29500")
    return host.strip("[]"), int(port)


def check_port(parallel: ParallelConfig) -> None:
    """Node 0 listens on the rendezvous port: raises if another process has it."""
    endpoint = endpoint_of(parallel)
    if endpoint is None or parallel.node_rank != 0:
        return
    with listen(endpoint[1]):
        pass


def listen(port: int) -> socket.socket:
    """A socket that listens on all addresses of this host, as torch's store does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({os.strerror(error.errno)})"
            raise HoldfastError(
                f"port {port} of this host {reason}: give another one with --rdzv-endpoint HOST:PORT, the same on all nodes"
            ) from None
        raise
