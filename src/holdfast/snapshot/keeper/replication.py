"""Between keepers: copies of a node's snapshots in another node's memory, and pulling them back. TCP, checksums, no torch.

Nodes form disjoint pairs (the last three a ring where they are odd), so losing two of many nodes rarely loses both copies. The
invariants: all nodes copy the same step, which their ranks choose, and keep their own of it until all have copied a newer one, so
that what a lost node leaves is of one step; a copy is READY only when all of it has come and its row sums verify; a chunk that
arrives damaged is sent again; a broken connection is resumed where it broke; peers that do not have the run's key are
rejected (`channel`), and connections that say nothing take up a few places for some seconds.
"""

import contextlib
import hashlib
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
from holdfast.snapshot.memory.run_memory import RunMemory, open_arenas, read_json, write_json
from holdfast.snapshot.memory.slot import NOTHING, READY, WRITING, DamagedError, Sizes, SlotHeader
from holdfast.system.atomic_files import rename_into_place
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal

CHUNK = 16 << 20
PULLED = "pulled-"
BYTES_PER_SECOND = 1e9
CONNECTIONS = 64
"""at a time; further ones are closed at once, and a peer tries again"""


def peer_of(nodes: list[str], node: str) -> str | None:
    """The node that holds the copies of `node`: its partner; in a last group of three, the next of the ring."""
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


def call(run_memory: RunMemory, node: str, patience: float = 0.0) -> Channel:
    """A channel to the keeper of a node. `patience`: it may be just starting, and what is known of it be its predecessor's."""
    deadline = time.monotonic() + patience
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
    """Brings one slot of another node's arena here, into a file of this process beside ours; its path."""
    path = (
        run_memory.path
        / f"{PULLED}{os.getpid()}-{hashlib.sha256(f'{node}/{file}/{slot}'.encode()).hexdigest()[:16]}.arena"
    )
    with call(run_memory, node, patience=TIMEOUT) as channel:
        channel.send({"do": "get", "file": file, "slot": slot})
        answer = channel.receive()
        if answer.get("trouble"):
            raise HoldfastError(f"{node} cannot send {file}: {answer['trouble']}")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        arena = _create_like(temporary, answer)
        try:
            target = arena.slot(slot)
            region = memoryview(target.map)
            for begin in range(PAGE, len(region), CHUNK):
                part = region[begin : begin + CHUNK]
                channel.receive_into(part)
                if channel.receive()["hash"] != xxhash.xxh3_64_hexdigest(part):
                    raise HoldfastError(f"{file} arrived damaged from {node}")
            header = SlotHeader(**answer["header"])
            target.store(header)
            target.verify(header)
            rename_into_place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
            arena.close()
    return path


def _create_like(path: Path, facts: dict[str, Any]) -> Arena:
    sizes = Sizes(*facts["sizes"])
    return Arena.create(
        path, sizes, facts["run"], facts["plan"], facts["rank"], facts["world"], facts["generation"], populate=False
    )


def _facts(arena: Arena) -> dict[str, Any]:
    return {
        "sizes": [arena.sizes.meta, arena.sizes.digest, arena.sizes.payload],
        "run": arena.run,
        "plan": arena.plan,
        "rank": arena.rank,
        "world": arena.world,
        "generation": arena.generation,
    }


class Replicator:
    """The keeper's side: serves other keepers and ships the step that the ranks chose to this node's peer, in threads of their
    own."""

    def __init__(self, run_memory: RunMemory, journal: Journal) -> None:
        self._place, self._journal = run_memory, journal
        self._identity = run_identity(keepers_folder(run_memory))
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self._shipped: list[SlotHeader] = []
        self._shipping: threading.Thread | None = None
        self._partial: dict[tuple[str, int], set[int]] = {}
        self._lock = threading.Lock()
        self._closed = False
        address = own_address(run_memory)
        self._listener = socket.create_server((address, 0))
        record = {"node": run_memory.node, "address": address, "port": self._listener.getsockname()[1]}
        write_json(node_file(run_memory, run_memory.node), record)
        threading.Thread(target=self._serve, daemon=True).start()

    def round(self, settings: dict[str, Any]) -> None:
        """Called by the keeper every so often: ships, if there is something new and the last shipment is over."""
        if settings.get("mode") != "peer" or (self._shipping is not None and self._shipping.is_alive()):
            return
        peer = peer_of(settings["nodes"], self._place.node)
        if peer is not None:
            self._shipping = threading.Thread(target=self._ship_newest, args=(peer, settings), daemon=True)
            self._shipping.start()

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`; close alone does not
        self._listener.close()
        node_file(self._place, self._place.node).unlink(missing_ok=True)

    def _ship_newest(self, peer: str, settings: dict[str, Any]) -> None:
        opened: list[Arena] = []
        try:
            opened = open_arenas(self._place.arenas(), self._place.key)
            held = _chosen(newest_generation(opened))
            headers = [found.header for found in held]
            if not held or headers == self._shipped:
                time.sleep(0.05)
                return
            begin, step = time.perf_counter(), headers[0].step
            for found in held:
                self._ship(peer, found, settings.get("peer_bytes_per_second", BYTES_PER_SECOND))
            if all(found.unchanged() for found in held):
                self._shipped = headers
                for rank, page in self._place.pages().items():
                    if rank in settings["here"]:
                        page["shipped"] = step
                self._journal.event(
                    "snapshot", step=step, outcome="peer", node=peer, seconds=time.perf_counter() - begin
                )
        except (OSError, HoldfastError, struct.error) as error:
            print(f"the newest step could not be copied to {peer}: {error}; trying again", flush=True)
            time.sleep(0.5)
        finally:
            for arena in opened:
                arena.close()

    def _ship(self, peer: str, held: ReadySlot, rate: float) -> None:
        with call(self._place, peer) as channel:
            self._send_slot(channel, held, rate)

    def _send_slot(self, channel: Channel, held: ReadySlot, rate: float) -> None:
        channel.send({"do": "put", "node": self._place.node, **_facts(held.arena), "header": held.header.__dict__})
        region = memoryview(held.slot.map)
        chunks = list(range(PAGE, len(region), CHUNK))
        have = set(channel.receive()["have"])
        waiting = [begin for begin in chunks if begin not in have]
        begin_time, sent = time.monotonic(), 0
        while waiting:
            begin = waiting.pop(0)
            part = region[begin : begin + CHUNK]
            channel.send({"chunk": begin, "length": len(part), "hash": xxhash.xxh3_64_hexdigest(part)})
            channel.send_bytes(part)
            sent += len(part)
            if not channel.receive()["good"]:
                waiting.insert(0, begin)
            time.sleep(max(0.0, sent / rate - (time.monotonic() - begin_time)))
        channel.send({"done": True})
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
                requests = {"get": self._send_held, "put": self._receive_slot}
                requests[request["do"]](channel, request)
        except (OSError, HoldfastError, struct.error, KeyError, TypeError, ValueError) as error:
            print(f"a peer's request failed: {error}", flush=True)
        finally:
            self._connections.release()

    def _send_held(self, channel: Channel, request: dict[str, Any]) -> None:
        try:
            arena = Arena(self._place.path / Path(request["file"]).name)
        except (OSError, DamagedError) as error:
            channel.send({"trouble": str(error)})
            return
        with contextlib.closing(arena):
            self._send_arena(channel, arena, int(request["slot"]))

    def _send_arena(self, channel: Channel, arena: Arena, index: int) -> None:
        slot = arena.slot(index)
        header = slot.header()
        if header.state != READY or arena.run != self._place.key:
            channel.send({"trouble": "the slot is empty"})
            return
        channel.send({**_facts(arena), "header": header.__dict__})
        region = memoryview(slot.map)
        for begin in range(PAGE, len(region), CHUNK):
            part = region[begin : begin + CHUNK]
            channel.send_bytes(part)
            channel.send({"hash": xxhash.xxh3_64_hexdigest(part)})

    def _receive_slot(self, channel: Channel, request: dict[str, Any]) -> None:
        """Receives one rank's snapshot into a copy of its arena here."""
        if request["run"] != self._place.key:
            raise HoldfastError("a peer offers the memory of another run")
        header = SlotHeader(**request["header"])
        node = hashlib.sha256(request["node"].encode()).hexdigest()[:8]
        stem = f"rank-{request['rank']:05d}-of-{request['world']:05d}.{request['plan'][:8]}"
        path = self._place.path / f"peer-{node}-{stem}.arena"
        with self._lock:
            arena = Arena(path) if path.exists() else _create_like(path, request)
            if _facts(arena) != {name: request[name] for name in _facts(arena)}:  # its small state needs more room now
                arena.close()
                arena = _create_like(path, request)
        index = self._slot_for(arena, header)
        slot = arena.slot(index)
        key = (path.name, header.sequence)
        have = self._partial.setdefault(key, set()) if slot.header().state == WRITING else set()
        self._partial = {k: v for k, v in self._partial.items() if k[0] != path.name}
        self._partial[key] = have
        slot.store(SlotHeader(WRITING, header.sequence, header.step, 0, 0, 0, 0, time.time()))
        channel.send({"have": sorted(have)})
        region = memoryview(slot.map)
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
        try:
            slot.verify(header)
            slot.store(header)
            channel.send({"committed": header.step})
        except HoldfastError as error:
            slot.store(NOTHING)
            channel.send({"trouble": str(error)})
        self._partial.pop(key, None)
        arena.close()

    def _slot_for(self, arena: Arena, header: SlotHeader) -> int:
        """The slot that is being filled with this snapshot, else the one that does not hold the newest."""
        headers = arena.headers()[:2]
        for index, known in enumerate(headers):
            if known.state == WRITING and known.sequence == header.sequence:
                return index
        ready = [known.sequence if known.state == READY else -1 for known in headers]
        return ready.index(min(ready))


def _chosen(arenas: Sequence[Arena]) -> list[ReadySlot]:
    """The slots of the newest step that all ranks here keep for the peer."""
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
