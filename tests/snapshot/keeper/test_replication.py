"""Two "nodes": two folders in memory, two keepers that talk over loopback; rows 21-23 of the matrix."""

import contextlib
import os
import shutil
import signal
import socket
import threading

import psutil
import pytest

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.snapshot.keeper import replication
from holdfast.snapshot.keeper.channel import Channel, run_identity
from holdfast.snapshot.memory.arena import SLOTS
from holdfast.snapshot.memory.run_memory import RunMemory, opened_arenas, read_json, write_json
from holdfast.snapshot.ranks.status_page import RankStatus, status_page_name
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from tests.disks import small_disk
from tests.snapshot.harness import Fault, keeper_process, launch, wait_for

pytestmark = pytest.mark.distributed


def places(run):
    return [RunMemory.of(run.name, run.folder, run.memory / f"node{node}") for node in range(2)]


@pytest.fixture
def pair(run):
    """Two ranks on two nodes, every rank's memory copied to the other node."""
    run.nodes = 2
    run.options = {"mode": "peer"}
    run.pace, run.steps = 0.05, 30
    for node in range(2):
        (run.memory / f"node{node}").mkdir()
    return run


def shipped(run):
    return [event["step"] for event in run.events("snapshot") if event["outcome"] == "peer"]


def stop_everything(run, launched):
    """A power cut: ranks and keepers are gone at once; memory is as it was."""
    keepers = [keeper_process(run_memory) for run_memory in places(run)]
    for process in keepers:
        os.kill(process, signal.SIGSTOP)
    launched.kill()
    launched.wait(run)
    for process in keepers:
        os.kill(process, signal.SIGKILL)
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)


def test_pairs_are_disjoint_and_everybody_has_a_peer():
    for count in range(2, 12):
        nodes = [f"n{i}" for i in range(count)]
        peers = {node: replication.peer_of(nodes, node) for node in nodes}
        assert all(peer and peer != node for node, peer in peers.items())
        assert len(set(peers.values())) == count, "no node holds copies for two"
        together = sum(peers[peer] == node for node, peer in peers.items())
        assert together == (count if count % 2 == 0 else count - 3)
    assert replication.peer_of(["a", "a"], "a") is None


def test_a_lost_node_is_restored_from_its_peer(pair, check):
    launched = launch(pair)
    wait_for(lambda: len(shipped(pair)) >= 6, "copies on the peer")
    stop_everything(pair, launched)
    shutil.rmtree(places(pair)[1].path)
    reached = places(pair)[0].pages()[0]["step"]
    pair.pace = 0.0
    check(pair, lost=8, sources=("mixed", "peer"))
    assert reached - pair.events("resumed")[0]["step"] <= 8


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_restored_although_copying_takes_many_steps(pair, check, lost):
    """All that is left of the lost node is a copy of a step that is long past: the others must hold theirs of that step."""
    pair.steps, pair.pace = 400, 0.02
    launched = launch(pair)
    wait_for(lambda: all(run_memory.arenas() for run_memory in places(pair)), "memory")
    for run_memory in places(pair):
        with opened_arenas(run_memory.arenas(), run_memory.key) as (arena,):
            slow = {"peer_bytes_per_second": arena.sizes.stride / 0.4}
        write_json(run_memory.path / "settings.json", {**read_json(run_memory.path / "settings.json"), **slow})
    before = len(shipped(pair))
    wait_for(lambda: len(shipped(pair)) >= before + 5, "copies on the peers")
    stop_everything(pair, launched)
    copied, reached = shipped(pair)[-1], places(pair)[1 - lost].pages()[1 - lost]["step"]
    assert reached - copied > 3, "copying takes many steps"
    shutil.rmtree(places(pair)[lost].path)
    pair.pace, pair.steps = 0.0, reached + 10
    check(pair, lost=reached, sources=("mixed", "peer"))
    (resumed,) = pair.events("resumed")
    assert resumed["step"] in shipped(pair)


def test_after_a_lost_node_a_second_crash_finds_everything_in_memory_too(pair, check):
    pair.steps = 60
    launched = launch(pair)
    wait_for(lambda: len(shipped(pair)) >= 4, "copies on the peer")
    stop_everything(pair, launched)
    shutil.rmtree(places(pair)[1].path)
    launched = launch(pair, attempt=1)
    wait_for(lambda: pair.events("resumed"), "the run to come back")
    before = len(shipped(pair))
    wait_for(lambda: len(shipped(pair)) >= before + 4, "copies of what followed")
    stop_everything(pair, launched)
    reached = max(run_memory.pages()[rank]["step"] for rank, run_memory in enumerate(places(pair)))
    pair.pace = 0.0
    check(pair, lost=8, sources=("mixed", "peer", "memory"))
    resumed = pair.events("resumed")[1]
    assert resumed["source"] == "memory" and reached - resumed["step"] <= 1


def test_a_node_and_its_peer_lost_leaves_the_disk(pair, check):
    pair.save_every = 4
    launched = launch(pair)
    wait_for(lambda: pair.events("persisted"), "a checkpoint")
    keepers = [keeper_process(run_memory) for run_memory in places(pair)]
    launched.kill()
    launched.wait(pair)
    for process in keepers:
        os.kill(process, signal.SIGKILL)
    for run_memory in places(pair):
        shutil.rmtree(run_memory.path)
    pair.pace, pair.save_every = 0.0, 0
    check(pair, lost=30, sources=("disk",))
    assert pair.events("resumed")[0]["step"] % 4 == 0


class Proxy:
    """A link between the nodes that damages the first chunk and breaks once, then behaves."""

    def __init__(self, port: int, harmless: bool = False) -> None:
        self._port = port
        self._harmless = harmless
        self.seen = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            number = self.connections
            threading.Thread(target=self._pump, args=(client, server, number), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, 0), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        passed = 0
        try:
            while content := source.recv(65536):
                if self._harmless:
                    self.seen += content
                elif number == 1 and passed > 20_000:
                    target.close()  # the link breaks in the middle of the first shipment
                    return
                elif number == 2 and passed < 30_000 <= passed + len(content):
                    damaged = bytearray(content)
                    damaged[-1] ^= 1
                    content = bytes(damaged)
                passed += len(content)
                target.sendall(content)
        except OSError:
            pass
        finally:
            target.close()


@pytest.mark.slow
def test_a_broken_and_damaging_link_delays_copies_and_stops_nothing(pair, check):
    pair.width, pair.steps = 64, 5000
    launched = launch(pair)
    there = places(pair)[1]
    record = wait_for(lambda: read_json(replication.node_file(there, there.node)), "the keeper of the other node")
    proxy = Proxy(record["port"])
    write_json(replication.node_file(there, there.node), {**record, "port": proxy.listener.getsockname()[1]})
    wait_for(lambda: proxy.connections >= 3, "the shipment to be tried again")
    before = len(shipped(pair))
    wait_for(lambda: len(shipped(pair)) >= before + 3, "copies to arrive after all")
    reached = places(pair)[0].pages()[0]["step"]
    wait_for(lambda: places(pair)[0].pages()[0]["step"] > reached, "training to go on")
    launched.kill()
    launched.wait(pair)
    proxy.listener.close()


def test_a_keeper_that_is_just_starting_is_waited_for(pair):
    """What the nodes know of it is the port of the one before, which was killed."""
    launched = launch(pair)
    here, there = places(pair)
    known = wait_for(lambda: read_json(replication.node_file(here, here.node)), "a keeper")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    write_json(replication.node_file(here, here.node), {**known, "port": port})
    threading.Timer(1.0, write_json, [replication.node_file(here, here.node), known]).start()
    with replication.connect(there, here.node, wait_seconds=60.0) as channel:
        channel.send({"do": "get", "file": "nothing", "slot": 0})
        assert "trouble" in channel.receive()
    launched.kill()
    launched.wait(pair)


def request_as(identity, record):
    connection = socket.create_connection(("127.0.0.1", record["port"]))
    with Channel(connection, identity, server=False) as channel:
        channel.send({"do": "get", "file": "rank-00000.status", "slot": 0})
        return channel.receive()


def test_a_peer_without_the_runs_key_is_rejected(pair, tmp_path):
    """Another run's key; no TLS; a relay of one keeper's handshake to itself. The keeper serves its peers all the while."""
    pair.steps = 4000
    launched = launch(pair)
    run_memory = places(pair)[0]
    record = wait_for(lambda: read_json(replication.node_file(run_memory, run_memory.node)), "a keeper")
    identity = run_identity(replication.keepers_folder(run_memory))
    assert identity.stat().st_mode & 0o077 == 0
    with pytest.raises(OSError):
        request_as(run_identity(tmp_path / "stranger"), record)
    with socket.create_connection(("127.0.0.1", record["port"])) as plain:
        plain.settimeout(60)
        plain.sendall(b"\0" * 48)
        with contextlib.suppress(ConnectionError):
            assert b"safetensors" not in b"".join(iter(lambda: plain.recv(65536), b""))
    assert "trouble" in request_as(identity, record)
    launched.kill()
    launched.wait(pair)


def test_what_passes_between_keepers_is_encrypted(pair):
    pair.steps = 4000
    launched = launch(pair)
    there = places(pair)[1]
    record = wait_for(lambda: read_json(replication.node_file(there, there.node)), "the keeper of the other node")
    proxy = Proxy(record["port"], harmless=True)
    write_json(replication.node_file(there, there.node), {**record, "port": proxy.listener.getsockname()[1]})
    wait_for(lambda: len(proxy.seen) > 20_000, "copies on the link")
    assert b"optimizer." not in proxy.seen and b"0.weight" not in proxy.seen
    launched.kill()
    launched.wait(pair)
    proxy.listener.close()


def test_silent_connections_neither_end_the_keeper_nor_stay(pair):
    pair.steps = 4000
    launched = launch(pair)
    run_memory = places(pair)[0]
    record = wait_for(lambda: read_json(replication.node_file(run_memory, run_memory.node)), "a keeper")
    process = psutil.Process(keeper_process(run_memory))
    silent = [socket.create_connection(("127.0.0.1", record["port"])) for _ in range(300)]
    assert process.num_fds() < 200
    before = len(shipped(pair))
    wait_for(lambda: len(shipped(pair)) >= before + 2, "copies to go on")
    wait_for(lambda: process.num_fds() < 60, "silent connections to be closed")
    assert process.is_running()
    for connection in silent:
        connection.close()
    launched.kill()
    launched.wait(pair)


def test_a_key_that_was_cut_short_is_refused_and_a_new_one_appears_whole(tmp_path):
    with small_disk(tmp_path / "full", "16k") as disk:
        (disk / "filler").write_bytes(b"x" * 16_384)
        with pytest.raises(OSError):
            run_identity(disk / "keepers")
        assert not list(disk.rglob("*.pem*"))
    (tmp_path / "identity.pem").write_bytes(b"")
    ours, theirs = socket.socketpair()
    with pytest.raises(HoldfastError, match="cannot be used"):
        Channel(ours, tmp_path / "identity.pem", server=True)
    theirs.close()


def test_a_node_without_peers_listens_only_while_another_one_restores_from_it(pair, oracle):
    pair.options = {"mode": "node"}
    launched = launch(pair)
    wait_for(lambda: len(pair.trace("restored")) == 2, "the run to train")
    wait_for(
        lambda: all(run_memory.pages()[rank]["ready"] >= 4 for rank, run_memory in enumerate(places(pair))), "snapshots"
    )
    assert not list(replication.keepers_folder(places(pair)[0]).glob("*.json"))
    stop_everything(pair, launched)
    shutil.rmtree(places(pair)[1].path)
    pair.pace = 0.0
    hashes = oracle(pair)
    assert launch(pair, 1).wait(pair)
    (resumed,) = pair.events("resumed")
    assert resumed["source"] == "memory"
    assert {entry["hash"] for entry in pair.trace("restored")[-2:]} == {hashes[resumed["step"]]}
    assert not list(replication.keepers_folder(places(pair)[0]).glob("*.json"))


def test_a_run_over_two_nodes_writes_one_checkpoint(pair, oracle):
    from tests.snapshot.keeper.test_service import hash_on_disk

    pair.save_every, pair.steps = 5, 6
    assert launch(pair).wait(pair)
    assert hash_on_disk(pair, 5) == oracle(pair)[5]


def test_stops_are_agreed_over_nodes(pair):
    pair.steps = 200
    pair.faults = [Fault("usr1", rank=1, step=6, point="backward")]
    assert launch(pair).wait(pair)
    assert len({end["step"] for end in pair.trace("ended")}) == 1


def test_a_rank_that_had_no_slot_for_the_last_step_saves_it_in_the_end(pair):
    pair.options, pair.steps, pair.save_every = {}, 20, 20
    launched = launch(pair)
    run_memory = places(pair)[1]
    path = run_memory.path / status_page_name(1)
    wait_for(lambda: path.exists() and RankStatus(path)["step"] >= 5, "the run to train")
    page = RankStatus(path)
    with opened_arenas(run_memory.arenas(), run_memory.key) as (arena,):
        for index in range(SLOTS):  # as if its disk took its time
            arena.pin(index, True)
        wait_for(lambda: page["step"] == 20, "the last step")
        wait_for(lambda: page["skipped"] >= 5, "snapshots without a slot")
        for index in range(SLOTS):
            arena.pin(index, False)
    assert launched.wait(pair)
    assert [step for step, _ in checkpoints_in(pair.folder)] == [20]


def test_a_replicator_whose_run_folder_is_gone_can_be_closed_and_closed_again(run):
    """Otherwise the keeper would try again for ever, and never free the memory."""
    run_memory = RunMemory.of(run.name, run.folder, run.memory)
    run.folder.mkdir()
    run_memory.make()
    replicator = replication.Replicator(run_memory, Journal(run.folder / "events.jsonl"))
    shutil.rmtree(run.folder)
    replicator.close()
    replicator.close()
