"""The rendezvous of nodes: a valid endpoint, a free port, and a wait with a limit."""

import socket
import subprocess
import sys
import threading

import pytest

from holdfast.config import ParallelConfig
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.rendezvous import check_port, wait_for_nodes
from tests.gloo import free_port


def test_a_port_in_use_is_refused_on_node_0_only():
    with socket.create_server(("", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(HoldfastError, match=f"port {endpoint[10:]} of this host is in use"):
            check_port(ParallelConfig(nnodes=2, rdzv_endpoint=endpoint))
        check_port(ParallelConfig(nnodes=2, node_rank=1, rdzv_endpoint=endpoint))
    check_port(ParallelConfig(nnodes=2, rdzv_endpoint=endpoint))


@pytest.mark.parametrize("endpoint", [None, "node0", "node0:", ":29500", "node0:port", "node0:99999"])
def test_an_endpoint_that_is_not_host_and_port_is_a_usage_error(endpoint):
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        check_port(ParallelConfig(nnodes=2, rdzv_endpoint=endpoint))


@pytest.mark.parametrize("node", [0, 1])
def test_a_missing_node_is_reported_and_waited_for_with_a_limit(node, capfd):
    port = free_port()
    with pytest.raises(HoldfastError, match=f"waited 4 s for node {1 - node} of 2 at 127.0.0.1:{port}: start it"):
        wait_for_nodes("127.0.0.1", port, node, 2, limit=4.0)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"waiting for node {1 - node} of 2 at 127.0.0.1:{port}, ") and line.endswith(" s of 4 s")


def test_the_wait_ends_when_all_nodes_are_connected():
    port = free_port()
    code = f"from holdfast.train.rendezvous import wait_for_nodes; wait_for_nodes('127.0.0.1', {port}, 1, 3, 120.0)"
    second = subprocess.Popen([sys.executable, "-c", code])
    third = threading.Thread(target=wait_for_nodes, args=("127.0.0.1", port, 2, 3, 120.0))
    third.start()
    store = wait_for_nodes("127.0.0.1", port, 0, 3, 120.0)
    third.join()
    assert second.wait(120) == 0
    del store
