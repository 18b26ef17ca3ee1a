"""Copies a node's snapshots to the memory of another node, and pulls them back. TCP, checksums, no torch.

Nodes form disjoint pairs (the last three a ring where they are odd), so losing two of many nodes rarely loses both copies. The
invariants: all nodes copy the same step, which their ranks choose, and keep their own of it until all have copied a newer one, so
that what a lost node leaves is of one step; a copy is READY only when all of it has arrived and its row sums verify; a chunk that
arrives damaged is sent again; a broken connection is resumed where it broke; peers that do not have the run's key are
rejected (`channel`), and silent connections are limited in number and time.
"""

import contextlib
import hashlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from holdfast.checkpoint.layout import PAGE
from holdfast.snapshot.keeper.channel import TIMEOUT, Channel, run_identity
from holdfast.snapshot.memory.arena import PEER, Arena
from holdfast.snapshot.memory.ready_slot import ReadySlot, common_steps, find_ready, newest_generation
from holdfast.snapshot.memory.run_memory import RunMemory, opened_arenas, read_json, write_json
from holdfast.snapshot.memory.slot import NOTHING, READY, WRITING, DamagedError, Sizes, SlotHeader
from holdfast.system.atomic_files import remove_temporaries, rename_into_place
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal

CHUNK = 16 << 20
PULLED = "pulled-"
BYTES_PER_SECOND = 1e9
CONNECTIONS = 64
"""at a time; further ones are closed at once, and the peer tries again"""


def peer_of(nodes: list[str], node: str) -> str | None:
    """The node that holds the copies of `node`: the other one of its pair; in a last group of three, the next of the ring."""
    order = list(dict.fromkeys(nodes))
    if len(order) < 2 or node not in order:
        return None
    index = order.index(node)
    if len(order) % 2 and index >= len(order) - 3:
        first = len(order) - 3
        return order[first + (index - first + 1) % 3]
    return order[index ^ 1]


def keepers_folder(run_memory: RunMemory) -> Path:
    return run_memory.folder / "keepers"


def node_file(run_memory: RunMemory, node: str) -> Path:
    return keepers_folder(run_memory) / f"{hashlib.sha256(node.encode()).hexdigest()[:16]}.json"


def connect(run_memory: RunMemory, node: str, wait_seconds: float = 0.0) -> Channel:
    """A channel to the keeper of a node. `wait_seconds`: it may be starting, and its file be that of a killed one."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            record = read_json(node_file(run_memory, node))
            if record is None:
                raise ConnectionError(f"no keeper is known on {node}")
            connection = socket.create_connection((record["address"], record["port"]), timeout=TIMEOUT)
            return Channel(connection, run_identity(keepers_folder(run_memory)), server=False)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def pull(run_memory: RunMemory, node: str, file: str, slot: int) -> Path:
    """Copies one slot of another node's arena to a file of this process in the run's memory here; its path."""
    source = hashlib.sha256(f"{node}/{file}/{slot}".encode()).hexdigest()[:16]
    path = run_memory.path / f"{PULLED}{os.getpid()}-{source}.arena"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with connect(run_memory, node, wait_seconds=TIMEOUT) as channel:
        channel.send({"do": "get", "file": file, "slot": slot})
        answer = channel.receive()
        if answer.get("trouble"):
            raise HoldfastError(f"{node} cannot send {file}: {answer['trouble']}")
        try:
            with contextlib.closing(_create_like(temporary, answer)) as arena:
                target, header = arena.slot(slot), SlotHeader(**answer["header"])
                _receive_chunks(channel, memoryview(target.map), set())
                target.store(header)
                target.verify(header)
            rename_into_place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _send_chunks(channel: Channel, region: memoryview, bytes_per_second: float = math.inf) -> None:
    """Sends a slot, without its header page and the chunks that the other side has."""
    have = set(channel.receive()["have"])
    waiting = [begin for begin in range(PAGE, len(region), CHUNK) if begin not in have]
    begin_time, sent = time.monotonic(), 0
    while waiting:
        begin = waiting.pop(0)
        part = region[begin : begin + CHUNK]
        channel.send({"chunk": begin, "length": len(part), "hash": xxhash.xxh3_64_hexdigest(part)})
        channel.send_bytes(part)
        sent += len(part)
        if not channel.receive()["good"]:
            waiting.insert(0, begin)
        time.sleep(max(0.0, sent / bytes_per_second - (time.monotonic() - begin_time)))
    channel.send({"done": True})


def _receive_chunks(channel: Channel, region: memoryview, have: set[int]) -> None:
    """The other end of `_send_chunks`; adds each chunk that arrives undamaged to `have`."""
    channel.send({"have": sorted(have)})
    while not (message := channel.receive()).get("done"):
        begin, length = int(message["chunk"]), int(message["length"])
        part = region[begin : begin + length]
        if begin < PAGE or len(part) != length:
            raise HoldfastError("a peer sent a chunk that does not fit")
        channel.receive_into(part)
        good = xxhash.xxh3_64_hexdigest(part) == message["hash"]
        if good:
            have.add(begin)
        channel.send({"good": good})


def _create_like(path: Path, description: dict[str, Any]) -> Arena:
    run, plan, rank, world, generation = (description[name] for name in ("run", "plan", "rank", "world", "generation"))
    return Arena.create(path, Sizes(*description["sizes"]), run, plan, rank, world, generation, populate=False)


def _describe(arena: Arena) -> dict[str, Any]:
    return {
        "sizes": [arena.sizes.meta, arena.sizes.digest, arena.sizes.payload],
        "run": arena.run,
        "plan": arena.plan,
        "rank": arena.rank,
        "world": arena.world,
        "generation": arena.generation,
    }


class Replicator:
    """Serves other keepers, and copies the step that the ranks chose to this node's peer, in threads of their own."""

    def __init__(self, run_memory: RunMemory, journal: Journal) -> None:
        self._run_memory, self._journal = run_memory, journal
        self._identity = run_identity(keepers_folder(run_memory))
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self._copied: list[SlotHeader] = []
        self._copying: threading.Thread | None = None
        self._partial: dict[tuple[str, int], set[int]] = {}
        self._lock = threading.Lock()
        self._closed = False
        address = own_address(run_memory)
        self._listener = socket.create_server((address, 0))
        record = {"node": run_memory.node, "address": address, "port": self._listener.getsockname()[1]}
        try:
            write_json(node_file(run_memory, run_memory.node), record)
        except OSError:
            self._listener.close()
            raise
        threading.Thread(target=self._serve, daemon=True).start()

    def round(self, settings: dict[str, Any]) -> None:
        """Called by the keeper in every round: begins to copy, unless a copy is under way."""
        if settings.get("mode") != "peer" or (self._copying is not None and self._copying.is_alive()):
            return
        peer = peer_of(settings["nodes"], self._run_memory.node)
        if peer is not None:
            self._copying = threading.Thread(target=self._copy_newest, args=(peer, settings), daemon=True)
            self._copying.start()

    def close(self) -> None:
        """Stops serving and removes this node's record. May be called again after it failed, on a disk that does not answer."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`; close alone does not
        self._listener.close()
        record = node_file(self._run_memory, self._run_memory.node)
        record.unlink(missing_ok=True)
        for written in (record, self._identity):  # a keeper that was killed while it wrote one left a temporary file
            remove_temporaries(written)

    def _copy_newest(self, peer: str, settings: dict[str, Any]) -> None:
        try:
            with opened_arenas(self._run_memory.arenas(), self._run_memory.key) as arenas:
                self._copy_pinned(_pinned_for_peer(newest_generation(arenas)), peer, settings)
        except (OSError, HoldfastError, struct.error) as error:
            print(f"the newest step could not be copied to {peer}: {error}; trying again", flush=True)
            time.sleep(0.5)

    def _copy_pinned(self, held: list[ReadySlot], peer: str, settings: dict[str, Any]) -> None:
        headers = [found.header for found in held]
        if not held or headers == self._copied:
            time.sleep(0.05)
            return
        begin, step = time.perf_counter(), headers[0].step
        rate = settings.get("peer_bytes_per_second", BYTES_PER_SECOND)
        for found in held:
            with connect(self._run_memory, peer) as channel:
                self._send_slot(channel, found, rate)
        if all(found.unchanged() for found in held):
            self._copied = headers
            for rank, page in self._run_memory.pages().items():
                if rank in settings["here"]:
                    page["shipped"] = step
            self._journal.event("snapshot", step=step, outcome="peer", node=peer, seconds=time.perf_counter() - begin)

    def _send_slot(self, channel: Channel, held: ReadySlot, bytes_per_second: float) -> None:
        node = self._run_memory.node
        channel.send({"do": "put", "node": node, **_describe(held.arena), "header": held.header.__dict__})
        _send_chunks(channel, memoryview(held.slot.map), bytes_per_second)
        if trouble := channel.receive().get("trouble"):
            raise HoldfastError(trouble)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                print(f"a connection of a peer cannot be accepted: {error}; waiting for the next one", flush=True)
                time.sleep(0.5)
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with Channel(connection, self._identity, server=True) as channel:
                request = channel.receive()
                requests = {"get": self._answer_get, "put": self._answer_put}
                requests[request["do"]](channel, request)
        except (OSError, HoldfastError, struct.error, KeyError, TypeError, ValueError) as error:
            print(f"a peer's request failed: {error}", flush=True)
        finally:
            self._connections.release()

    def _answer_get(self, channel: Channel, request: dict[str, Any]) -> None:
        try:
            arena = Arena(self._run_memory.path / Path(request["file"]).name)
        except (OSError, DamagedError) as error:
            channel.send({"trouble": str(error)})
            return
        with contextlib.closing(arena):
            slot = arena.slot(int(request["slot"]))
            header = slot.header()
            if header.state != READY or arena.run != self._run_memory.key:
                channel.send({"trouble": "the slot is empty"})
                return
            channel.send({**_describe(arena), "header": header.__dict__})
            _send_chunks(channel, memoryview(slot.map))

    def _answer_put(self, channel: Channel, request: dict[str, Any]) -> None:
        """Receives one rank's snapshot into a copy of its arena here."""
        if request["run"] != self._run_memory.key:
            raise HoldfastError("a peer offers the memory of another run")
        header = SlotHeader(**request["header"])
        with contextlib.closing(self._copy_of(request)) as arena:
            slot = arena.slot(self._slot_for(arena, header))
            name = arena.path.name
            key = (name, header.sequence)
            have = self._partial.get(key, set()) if slot.header().state == WRITING else set()
            self._partial = {k: v for k, v in self._partial.items() if k[0] != name} | {key: have}
            slot.store(SlotHeader(WRITING, header.sequence, header.step, 0, 0, 0, 0, time.time()))
            _receive_chunks(channel, memoryview(slot.map), have)
            try:
                slot.verify(header)
                slot.store(header)
                channel.send({"committed": header.step})
            except HoldfastError as error:
                slot.store(NOTHING)
                channel.send({"trouble": str(error)})
            self._partial.pop(key, None)

    def _copy_of(self, request: dict[str, Any]) -> Arena:
        """The arena in which this node holds the copies of one rank of a peer."""
        node = hashlib.sha256(request["node"].encode()).hexdigest()[:8]
        stem = f"rank-{request['rank']:05d}-of-{request['world']:05d}.{request['plan'][:8]}"
        path = self._run_memory.path / f"peer-{node}-{stem}.arena"
        with self._lock:
            arena = Arena(path) if path.exists() else _create_like(path, request)
            if _describe(arena) == {name: request[name] for name in _describe(arena)}:
                return arena
            arena.close()  # its small state needs more room now
            return _create_like(path, request)

    def _slot_for(self, arena: Arena, header: SlotHeader) -> int:
        """The slot that is being filled with this snapshot, else the one that does not hold the newest."""
        headers = arena.headers()[:2]
        for index, known in enumerate(headers):
            if known.state == WRITING and known.sequence == header.sequence:
                return index
        ready = [known.sequence if known.state == READY else -1 for known in headers]
        return ready.index(min(ready))


def _pinned_for_peer(arenas: Sequence[Arena]) -> list[ReadySlot]:
    """The slots of the newest step that all ranks of this node pin for the peer."""
    for step in common_steps(arenas):
        held = [found for arena in arenas if (found := find_ready(arena, step))]
        if held and all(found.arena.pinned(found.index, PEER) for found in held):
            return held
    return []


def own_address(run_memory: RunMemory) -> str:
    """The address of this node that the other nodes reach: the one from which it would send to them."""
    settings = read_json(run_memory.path / "settings.json") or {}
    hosts = {node.partition(":")[0] for node in settings.get("nodes", [])}
    others = sorted(hosts - {socket.gethostname()})
    if not others:
        return "127.0.0.1"  # nodes that are folders of one machine
    for other in others:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    raise HoldfastError(f"the other nodes of the run cannot be found by name: {', '.join(others)}")
