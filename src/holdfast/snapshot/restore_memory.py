"""Loading a state from the memory of the nodes: what every node holds, which steps are whole, and the tensors out of their slots.

The ranks of a node verify together what is in its memory. The invariants: every rank sees the same candidates and the same
damage; every byte is verified before it is loaded; a candidate is rejected on all ranks or on none.
"""

import os
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.collective import agreed
from holdfast.checkpoint.json_state import DTYPES
from holdfast.checkpoint.layout import NUMPY_TYPES
from holdfast.checkpoint.loading import load_into, refuse_unused
from holdfast.checkpoint.manifest import merge_settings
from holdfast.checkpoint.reader import Bytes, Tensors
from holdfast.checkpoint.state import State
from holdfast.snapshot.keeper.replication import PULLED, pull
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.device_read import THREADS, fits, read_verified
from holdfast.snapshot.memory.run_memory import SERVE, RunMemory, opened_arenas
from holdfast.snapshot.memory.slot import READY, DamagedError, Slot, SlotHeader
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

MIN_REGISTERED_BYTES = 1 << 20


class RejectedState(HoldfastError):
    """A state that cannot be used; the next one is tried. Raised on all ranks."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source} cannot be used: {reason}")
        self.source, self.reason = source, reason


@dataclass(frozen=True)
class Location:
    """One rank's snapshot of one step, in the memory of one node."""

    node: str
    file: str
    slot: int
    rank: int
    world: int
    generation: int
    step: int
    sequence: int
    peer: bool
    """a copy that the node holds for another one"""
    complete: list[list[int]]
    """sets of ranks, each of which holds the whole state"""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.node, self.file, self.slot


@dataclass(frozen=True)
class Candidate:
    """A step of which the nodes hold the whole state, by one plan."""

    step: int
    locations: dict[int, list[Location]]
    """rank → where its snapshot is: the rank's own node before peer copies"""

    def complete_ranks(self) -> list[int] | None:
        """The first set of ranks that holds the whole state and is in memory."""
        complete = next((locations[0].complete for locations in self.locations.values()), [])
        return next((sorted(ranks) for ranks in complete if set(ranks) <= set(self.locations)), None)

    def has_all_ranks(self) -> bool:
        """Whether each rank's own state is in memory too: its random generators, and extra state that differs between ranks."""
        return all(set(self.locations) >= set(range(at[0].world)) for at in self.locations.values())

    def without(self, keys: Collection[tuple[str, str, int]]) -> "Candidate":
        kept = {rank: [at for at in locations if at.key not in keys] for rank, locations in self.locations.items()}
        return Candidate(self.step, {rank: locations for rank, locations in kept.items() if locations})


@dataclass(frozen=True)
class HeldState:
    candidates: list[Candidate]
    sequence: int
    """the highest sequence number in memory; 0 if it is empty"""
    unusable: list[str]
    """what memory holds of the run that cannot be used"""


@dataclass(frozen=True)
class LoadedState:
    """Tensors and optimizer settings are in place; this is what is left to apply."""

    source: str
    """memory, peer, mixed or disk"""
    extra: dict[str, Any]
    random: Any
    """None if the state is of another world size"""
    arena: Arena | None = None
    """this rank's memory, still mapped"""


def list_candidates(rank_group: RankGroup, committed: int, event: Callable[..., None]) -> HeldState:
    """What all nodes hold; collective. `committed`: the newest step that all ranks are known to have held."""
    run_memory = rank_group.run_memory
    own: list[dict[str, Any]] = []
    damaged: list[str] = []
    if rank_group.first_on_node:
        for peer, paths in ((False, run_memory.arenas()), (True, run_memory.peer_arenas())):
            with opened_arenas(paths, run_memory.key, damaged.append) as arenas:
                for arena in arenas:
                    own += [asdict(location) for location in _list_slots(arena, run_memory.node, peer, damaged.append)]
    gathered = rank_group.gather([own, damaged])
    unusable = [message for _, messages in gathered for message in messages]
    locations = [Location(**entry) for entries, _ in gathered for entry in entries]
    by_rank: dict[tuple[int, int], dict[int, list[Location]]] = defaultdict(lambda: defaultdict(list))
    for location in sorted(locations, key=lambda location: location.peer):
        by_rank[location.step, location.generation][location.rank].append(location)
    candidates = [Candidate(step, found) for (step, _), found in by_rank.items()]
    whole = [candidate for candidate in candidates if candidate.complete_ranks() is not None]
    if not whole and max(rank_group.gather(committed)) > 0:
        # All ranks once held a step; a crash before that leaves nothing to lose.
        partial = (
            f"step {c.step} of ranks {sorted(c.locations)} alone" for c in sorted(candidates, key=lambda c: c.step)
        )
        unusable.append(f"no step is complete: {', '.join(partial)}")
    for message in unusable if rank_group.rank == 0 else ():
        log(f"{message}; it is skipped")
        event("snapshot", outcome="rejected", reason=message)
    return HeldState(whole, max((location.sequence for location in locations), default=0), unusable)


def _list_slots(arena: Arena, node: str, peer: bool, on_damage: Callable[[str], None]) -> list[Location]:
    found = []
    for index in arena.damaged_headers():
        on_damage(f"the header of slot {index} of {arena.path} is damaged")
    for index, header in enumerate(arena.headers()):
        if header.state != READY:
            continue
        try:
            complete = arena.slot(index).small_state(header)["complete"]
        except DamagedError as error:
            on_damage(str(error))
            continue
        slot = (arena.path.name, index, arena.rank, arena.world, arena.generation, header.step, header.sequence)
        found.append(Location(node, *slot, peer, complete))
    return found


def load_candidate(candidate: Candidate, state: State, rank_group: RankGroup) -> LoadedState:
    """Verifies a candidate and loads its tensors and optimizer settings into the state; collective."""
    opened = OpenedSlots(rank_group.run_memory, state)
    name = f"the snapshot of step {candidate.step} in memory"
    try:
        damaged = _verify(candidate, opened, rank_group)
        sound = candidate.without(damaged)
        ranks = sound.complete_ranks()
        if ranks is None:
            raise RejectedState(name, "; ".join(sorted(damaged.values())))
        source = Tensors(f"the snapshot of step {candidate.step}", {})
        small = _open_all(sound, ranks, source, opened, rank_group)
        with state.undone_on_error():
            with agreed(rank_group.group):
                load_into(source, state, small[ranks[0]]["padded_rows"])
            refuse_unused(source.tensors, state, source.origin, rank_group.group)
    except BaseException:
        opened.close_except(None)
        raise
    arena = opened.close_except(rank_group.rank)
    state.apply_optimizer_settings(merge_settings([small[rank]["optimizer"] for rank in sorted(small)]))
    own = small.get(rank_group.rank) if small[ranks[0]]["world"] == rank_group.world else None
    peers = [sound.locations[rank][0].peer for rank in ranks]
    origin = "peer" if all(peers) else "mixed" if any(peers) else "memory"
    return LoadedState(origin, (own or small[min(small)])["extra"], own["random"] if own else None, arena)


def _open_all(
    candidate: Candidate, ranks: Sequence[int], source: Tensors, opened: "OpenedSlots", rank_group: RankGroup
) -> dict[int, dict[str, Any]]:
    """Adds the slots of these ranks to the source, pulled from other nodes where this one has none; each rank's small state."""
    locations, rank, run_memory = candidate.locations, rank_group.rank, rank_group.run_memory
    pulls = any(not set(rank_group.nodes) <= {at.node for at in locations[needed]} for needed in ranks)
    small: dict[int, dict[str, Any]] = {}
    trouble: Exception | None = None
    if pulls and rank_group.first_on_node:
        (run_memory.path / SERVE).touch(mode=0o600)
    try:
        small = {needed: opened.add(source, locations[needed]) for needed in ranks}
        if rank not in small and any(at.node == run_memory.node for at in locations.get(rank, ())):
            small[rank] = opened.add(None, locations[rank])
    except (HoldfastError, OSError, struct.error) as error:
        trouble = error
    troubles = [message for message in rank_group.gather(str(trouble) if trouble else None) if message]
    if pulls and rank_group.first_on_node:
        (run_memory.path / SERVE).unlink(missing_ok=True)
    if troubles:  # a peer that does not answer, for example: an older state is better than none
        raise RejectedState(f"the snapshot of step {candidate.step} in memory", troubles[0])
    return small


def _verify(candidate: Candidate, opened: "OpenedSlots", rank_group: RankGroup) -> dict[tuple[str, str, int], str]:
    """The ranks of a node verify its memory together; every rank gets all damaged locations, of all nodes, with the reason.

    A rank reads its own slot to its device if there is room, and verifies it there; the ranks share the others.
    """
    run_memory = rank_group.run_memory
    share, of = rank_group.node_ranks.index(rank_group.rank), len(rank_group.node_ranks)
    own = candidate.locations.get(rank_group.rank, [])
    gathered = rank_group.gather(next((at.key for at in own if opened.can_stage(at)), ()))
    staged = [tuple(key) for key in gathered]
    damaged = []
    for location in (location for locations in candidate.locations.values() for location in locations):
        mine = location.key == staged[rank_group.rank]
        if location.node != run_memory.node or (not mine and location.key in staged):
            continue
        try:
            slot = opened.arena(run_memory.path / location.file).slot(location.slot)
            header = slot.header()
            if header.state != READY or header.step != location.step:
                raise DamagedError(f"{slot.origin} no longer holds step {location.step}")
            if mine:
                opened.stage(location, header)
            else:
                # numpy releases the interpreter lock while it sums
                slot.verify(header, share, of, threads=max(1, min(8, (os.cpu_count() or 1) // of)))
        except (DamagedError, FileNotFoundError) as error:
            damaged.append([*location.key, str(error)])
            log(str(error))
    every = (entry for entries in rank_group.gather(damaged) for entry in entries)
    return {(node, file, slot): reason for node, file, slot, reason in every}


class _SlotContent:
    """The payload of a verified slot, to assemble tensors from; registered with CUDA if large parts are read."""

    types: Mapping[str, Any] = NUMPY_TYPES

    def __init__(self, slot: Slot, device: torch.device | None) -> None:
        self._slot, self._device = slot, device

    def view(self, begin: int, end: int) -> Bytes:
        if self._device is not None and end - begin >= MIN_REGISTERED_BYTES:
            self._slot.register(self._device)
        return self._slot.payload[begin:end]


class _DeviceContent:
    """The payload of a slot that was verified on the device."""

    types: Mapping[str, Any] = DTYPES

    def __init__(self, payload: torch.Tensor) -> None:
        self._payload = payload

    def view(self, begin: int, end: int) -> torch.Tensor:
        return self._payload[begin:end]


def staging_device(state: State) -> torch.device | None:
    """The device that slots are read to; None if the state is on the CPU."""
    return next((parameter.device for parameter in state.parameters.values() if parameter.is_cuda), None)


class OpenedSlots:
    """The slots that a state is loaded from: mapped, or pulled from another node."""

    def __init__(self, run_memory: RunMemory, state: State) -> None:
        self._run_memory = run_memory
        self._device = staging_device(state)
        self._arenas: dict[Path, Arena] = {}
        self._staged: dict[tuple[str, str, int], torch.Tensor] = {}

    def arena(self, path: Path) -> Arena:
        """Mapped once: the pages that were verified are still mapped when they are copied."""
        if path not in self._arenas:
            self._arenas[path] = Arena(path)
        return self._arenas[path]

    def can_stage(self, location: Location) -> bool:
        """Whether this slot can be read to the device as a whole, beside the tensors that are loaded from it."""
        if self._device is None or location.node != self._run_memory.node:
            return False
        try:
            return fits(self.arena(self._run_memory.path / location.file).sizes.payload, self._device)
        except (DamagedError, FileNotFoundError):
            return False

    def stage(self, location: Location, header: SlotHeader) -> None:
        """Reads a slot to the device and verifies it there; `add` then takes its tensors from there."""
        assert self._device is not None
        arena = self.arena(self._run_memory.path / location.file)
        try:
            self._staged[location.key] = read_verified(arena, location.slot, header, self._device)
        except torch.OutOfMemoryError:  # another process took it meanwhile
            arena.slot(location.slot).verify(header, threads=THREADS)

    def add(self, source: Tensors | None, locations: Sequence[Location]) -> dict[str, Any]:
        """Adds one rank's tensor slices to the source; returns the rank's small state."""
        node = self._run_memory.node
        location = next((at for at in locations if at.node == node), locations[0])
        if location.node == node:
            path = self._run_memory.path / location.file
        else:
            path = pull(self._run_memory, location.node, location.file, location.slot)
        slot = self.arena(path).slot(location.slot)
        header = slot.header()
        if source is not None:
            layout = slot.layout(header)
            staged = self._staged.get(location.key)
            content = _SlotContent(slot, self._device) if staged is None else _DeviceContent(staged)
            for piece, start in zip(layout.pieces, layout.starts, strict=True):
                source.tensors[piece.name] = (piece.dtype, piece.global_shape)
                source.add(piece, start, content)
        return slot.small_state(header)

    def close_except(self, rank: int | None) -> Arena | None:
        """Closes all arenas but this rank's own, which is returned: mapping takes long, and the run goes on with it."""
        self._staged.clear()
        own = None
        for path, arena in self._arenas.items():
            if own is None and arena.rank == rank and path in self._run_memory.arenas():
                own = arena
                continue
            arena.close()
            if path.name.startswith(PULLED):
                path.unlink()
        return own
