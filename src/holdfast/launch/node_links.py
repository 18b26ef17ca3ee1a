"""Measures the links between the nodes of a job: clock skew, bandwidth, and whether a file lock excludes other nodes.

Every task of a step runs it (`srun --ntasks-per-node=1 holdfast doctor`). Node 0 listens, the others connect, and node 0 reports
for all. It uses plain TCP, which torch needs before NCCL starts.
"""

import fcntl
import json
import os
import re
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.system.errors import HoldfastError

PINGS = 20
PAYLOAD = 64 << 20
WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class NodeLink:
    """The link between node 0 and another node."""

    node: str
    skew_ms: float
    round_trip_ms: float
    megabytes_per_s: float
    locks_not_seen: tuple[str, ...]


def task_of_step() -> tuple[int, int] | None:
    """(number of this node, number of nodes) inside a Slurm step of several nodes; None elsewhere."""
    if "SLURM_PROCID" not in os.environ or int(os.environ.get("SLURM_NNODES", "1")) < 2:
        return None
    return int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"])


def first_host(nodes: str) -> str:
    """n7 of Slurm's node list `n[7-9,12],m1`, without Slurm's commands, which a container may lack."""
    prefix, first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes).groups()  # type: ignore[union-attr]
    return prefix + (first or "")


def measure(node: int, nodes: int, folders: Sequence[Path]) -> list[NodeLink]:
    """On node 0: the links to all other nodes. On another node: measures with node 0 and returns nothing."""
    host = first_host(os.environ["SLURM_JOB_NODELIST"])
    port = 20000 + (int(os.environ["SLURM_JOB_ID"]) * 7 + int(os.environ.get("SLURM_STEP_ID", "0"))) % 10000
    if node:
        measure_with_first_node(host, port, folders)
        return []
    with ExitStack() as held, socket.create_server(("", port)) as server:
        for folder in folders:
            hold_lock(folder, held)
        server.settimeout(WAIT_SECONDS)
        links: list[NodeLink] = []
        for _ in range(nodes - 1):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise HoldfastError(
                    f"only {len(links) + 1} of {nodes} nodes reached {host}:{port} within {WAIT_SECONDS:.0f} s; "
                    "check the firewall between the nodes, and that the step has one task per node"
                ) from None
            with connection:
                links.append(measure_with_node(connection))
        return sorted(links, key=lambda link: link.node)


def measure_with_node(connection: socket.socket) -> NodeLink:
    connection.settimeout(WAIT_SECONDS)
    for _ in range(PINGS):
        receive(connection, 1)
        connection.sendall(f"{time.time():<32.9f}".encode())
    receive(connection, PAYLOAD)
    connection.sendall(b".")
    answer = json.loads(receive(connection, int(receive(connection, 8))))
    return NodeLink(**{**answer, "locks_not_seen": tuple(answer["locks_not_seen"])})


def measure_with_first_node(host: str, port: int, folders: Sequence[Path]) -> None:
    with connect(host, port) as connection:
        pings = [ping(connection) for _ in range(PINGS)]
        trip, skew = min(pings)
        start = time.perf_counter()
        connection.sendall(bytes(PAYLOAD))
        receive(connection, 1)
        rate = PAYLOAD / 1e6 / (time.perf_counter() - start)
        not_seen = tuple(str(folder) for folder in folders if not lock_is_seen(folder))
        trip = statistics.median(trip for trip, _ in pings)
        answer = json.dumps(asdict(NodeLink(socket.gethostname(), skew * 1e3, trip * 1e3, rate, not_seen))).encode()
        connection.sendall(f"{len(answer):8d}".encode() + answer)


def ping(connection: socket.socket) -> tuple[float, float]:
    """(round trip, offset of the other clock), both in seconds."""
    sent, start = time.time(), time.perf_counter()
    connection.sendall(b".")
    theirs = float(receive(connection, 32))
    trip = time.perf_counter() - start
    return trip, theirs - (sent + trip / 2)


def connect(host: str, port: int) -> socket.socket:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=WAIT_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                raise HoldfastError(f"cannot reach {host}:{port} of the first node: {error}") from None
            time.sleep(0.1)


def receive(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise HoldfastError("the other node closed the connection during the check")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def lock_file(folder: Path) -> Path:
    return folder / f".holdfast-doctor-{os.environ.get('SLURM_JOB_ID', 'local')}.lock"


def hold_lock(folder: Path, held: ExitStack) -> None:
    path = lock_file(folder)
    file = held.enter_context(path.open("w"))
    held.callback(path.unlink, missing_ok=True)
    with suppress(OSError):  # a file system without flock: the other nodes will not be excluded
        fcntl.flock(file, fcntl.LOCK_EX)


def lock_is_seen(folder: Path) -> bool:
    """Whether the lock of node 0 excludes this node."""
    try:
        file = lock_file(folder).open("r+")
    except FileNotFoundError:
        return True  # the folder is local to this node
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False
