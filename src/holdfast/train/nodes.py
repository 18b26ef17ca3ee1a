"""The nodes of a run meet before their ranks start: node 0 listens, the others connect, and every wait is reported.

torch's own rendezvous waits without a word. It follows when all nodes are there, and shares the store that is made here.
"""

import socket
import time
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log
from holdfast.train.checks.host_checks import listen

FIRST_LINE_SECONDS, LINE_SECONDS = 3.0, 10.0
CONNECT_SECONDS = 2.0
POLL_SECONDS = 0.1
COMPLETE = "holdfast/complete"


class _Wait:
    """Reports a wait every ten seconds and ends it at the limit."""

    def __init__(self, limit: float) -> None:
        self._limit, self._began = limit, time.monotonic()
        self._next = FIRST_LINE_SECONDS

    def report(self, missing: str) -> None:
        waited = time.monotonic() - self._began
        if waited > self._limit:
            raise HoldfastError(
                f"{missing} did not come within {self._limit:.0f} s: start it with the same --nnodes and --rdzv-endpoint, or "
                "wait longer with --distributed-timeout-minutes"
            )
        if waited >= self._next:
            self._next += LINE_SECONDS
            log(f"waiting for {missing}, {waited:.0f} s of {self._limit:.0f} s")


def meet_nodes(host: str, port: int, node: int, nodes: int, limit: float) -> TCPStore:
    """Returns when all nodes are there. Keep the store that it returns: node 0 serves it."""
    wait = _Wait(limit)
    where = f"at {host}:{port}"
    if node == 0:
        with listen(port):
            _reach(host, port, wait, f"this host (node 0) to be reachable {where}")
        store = _store(host, port, True, limit)
    else:
        store = _join(host, port, wait, f"node 0 of {nodes} {where}", limit)
    store.set(f"holdfast/node-{node}", socket.gethostname())
    if node == 0:
        missing = list(range(1, nodes))
        while missing := [other for other in missing if not store.check([f"holdfast/node-{other}"])]:
            wait.report(f"node {', '.join(map(str, missing))} of {nodes} {where}")
            time.sleep(POLL_SECONDS)
        store.set(COMPLETE, "")
    while not store.check([COMPLETE]):
        wait.report(f"the other nodes of {nodes} {where}")
        time.sleep(POLL_SECONDS)
    return store


def _store(host: str, port: int, serve: bool, limit: float) -> TCPStore:
    timeout = timedelta(seconds=max(limit, 10.0))
    return TCPStore(host, port, is_master=serve, wait_for_workers=False, multi_tenant=True, timeout=timeout)


def _join(host: str, port: int, wait: _Wait, missing: str, limit: float) -> TCPStore:
    while True:
        _reach(host, port, wait, missing)
        try:
            return _store(host, port, False, limit)
        except DistError:  # node 0 only tried the port, and serves the store a moment later
            wait.report(missing)
            time.sleep(POLL_SECONDS)


def _reach(host: str, port: int, wait: _Wait, missing: str) -> None:
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return
        except OSError:
            wait.report(missing)
            time.sleep(POLL_SECONDS)
