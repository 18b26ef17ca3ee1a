"""The rendezvous of a run's nodes before their ranks start: node 0 listens, the others connect, every wait is logged.

torch's own rendezvous logs nothing while it waits. It runs after this one, when all nodes are connected, and shares its store.
"""

import errno
import os
import socket
import time
from datetime import timedelta
from typing import Any

from holdfast.config import ParallelConfig
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log

FIRST_LINE_SECONDS, LINE_SECONDS = 3.0, 10.0
CONNECT_SECONDS = 2.0
POLL_SECONDS = 0.1
COMPLETE = "holdfast/complete"
LOCAL_HOST = "127.0.0.1"


def endpoint_of(parallel: ParallelConfig) -> tuple[str, int] | None:
    """Host and port of --rdzv-endpoint; None for one node, which picks a free port."""
    if parallel.rdzv_endpoint is None:
        if parallel.nnodes > 1:
            raise UsageError(f"--nnodes {parallel.nnodes} needs --rdzv-endpoint HOST:PORT, HOST being node 0")
        return None
    host, _, port = parallel.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--rdzv-endpoint {parallel.rdzv_endpoint} is not HOST:PORT, for example node0:29500")
    return host.strip("[]"), int(port)


def check_port(parallel: ParallelConfig) -> None:
    """On node 0, raises if another process uses the rendezvous port."""
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


class _Wait:
    """Logs a wait every ten seconds and raises at the limit."""

    def __init__(self, limit: float) -> None:
        self._limit, self._began = limit, time.monotonic()
        self._next = FIRST_LINE_SECONDS

    def report(self, missing: str) -> None:
        waited = time.monotonic() - self._began
        if waited > self._limit:
            raise HoldfastError(
                f"waited {self._limit:.0f} s for {missing}: start it with the same --nnodes and --rdzv-endpoint, or wait longer "
                "with --distributed-timeout-minutes"
            )
        if waited >= self._next:
            self._next += LINE_SECONDS
            log(f"waiting for {missing}, {waited:.0f} s of {self._limit:.0f} s")


def wait_for_nodes(host: str, port: int, node: int, nodes: int, limit: float) -> Any:
    """Returns torch's TCPStore when all nodes are connected. Keep a reference to it: node 0 serves it."""
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


def serve_one_node(port: int) -> Any:
    """torch's TCPStore of a run on one node; port 0 stands for a free one. Keep a reference to it."""
    return _store(LOCAL_HOST, port, True, 0.0)


def _join(host: str, port: int, wait: _Wait, missing: str, limit: float) -> Any:
    from torch.distributed import DistError

    while True:
        _reach(host, port, wait, missing)
        try:
            return _store(host, port, False, limit)
        except DistError:  # node 0 only tested the port, and serves the store a moment later
            wait.report(missing)
            time.sleep(POLL_SECONDS)


def _store(host: str, port: int, serve: bool, limit: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=max(limit, 10.0))
    return TCPStore(host, port, is_master=serve, wait_for_workers=False, multi_tenant=True, timeout=timeout)


def _reach(host: str, port: int, wait: _Wait, missing: str) -> None:
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return
        except OSError:
            wait.report(missing)
            time.sleep(POLL_SECONDS)
