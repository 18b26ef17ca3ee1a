"""What this host must offer: a memory file system, a free port, and the other nodes of the run."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.config import Config, ParallelConfig, TrainConfig
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.checks.host_checks import check_host, check_memory, check_port, file_system_of
from tests.disks import small_disk


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_snapshot_folder_that_does_not_exist_is_refused_and_not_made(tmp_path):
    with pytest.raises(HoldfastError, match="--snapshot-dir .*nope is not a folder"):
        check_memory(str(tmp_path / "nope"))
    assert not (tmp_path / "nope").exists()


def test_a_snapshot_folder_on_a_disk_is_warned_of(tmp_path):
    with small_disk(tmp_path / "with a space", "1m") as memory:
        assert file_system_of(memory) == "tmpfs"
        assert check_memory(str(memory)) == []
    assert file_system_of(Path("/proc/self")) == "proc"
    (warning,) = check_memory("/proc/self")
    assert "--snapshot-dir /proc/self is on proc, not in memory" in warning


def test_a_run_without_save_is_warned_of():
    (warning,) = check_host(Config())
    assert "no --save: this run keeps nothing" in warning
    assert check_host(Config(train=TrainConfig(save="run"))) == []


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
    from holdfast.train.nodes import meet_nodes

    port = free_port()
    with pytest.raises(HoldfastError, match=f"node {1 - node} of 2 at 127.0.0.1:{port} did not come within 4 s"):
        meet_nodes("127.0.0.1", port, node, 2, limit=4.0)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"waiting for node {1 - node} of 2 at 127.0.0.1:{port}, ") and line.endswith(" s of 4 s")


def test_nodes_that_all_come_meet():
    port = free_port()
    code = f"from holdfast.train.nodes import meet_nodes; meet_nodes('127.0.0.1', {port}, 1, 3, 120.0)"
    second = subprocess.Popen([sys.executable, "-c", code])
    from holdfast.train.nodes import meet_nodes

    third = threading.Thread(target=meet_nodes, args=("127.0.0.1", port, 2, 3, 120.0))
    third.start()
    store = meet_nodes("127.0.0.1", port, 0, 3, 120.0)
    third.join()
    assert second.wait(120) == 0
    del store
