"""Where to continue: the highest step for which every byte verifies, from memory, a peer's memory or disk.

Every node lists what it holds; all ranks see the same list and reach the same decision. The ranks of a node verify what
lies on it together; what cannot be used is left out and named, and the next copy of it, or the next step, is tried. The
invariants: what `restore` fills in was verified after it was chosen, is of one step on all ranks, and is the newest of its
kind; a run that has any state starts at step 0 only if the user removes that state.
"""

import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast.checkpoint.collective import agree
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.checkpoint.json_state import decode
from holdfast.checkpoint.loading import load, load_into, refuse_unused
from holdfast.checkpoint.manifest import merge_settings
from holdfast.checkpoint.reader import Bytes, Tensors
from holdfast.checkpoint.state import State
from holdfast.snapshot.keeper.client import start_keeper
from holdfast.snapshot.keeper.replication import PULLED, pull
from holdfast.snapshot.memory.arena import READY, Arena, DamagedError, Slot, forget
from holdfast.snapshot.memory.random_state import set_random_state
from holdfast.snapshot.memory.run_memory import SERVE, RunMemory, open_arenas
from holdfast.snapshot.nan_guard import NEAR
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

if TYPE_CHECKING:
    from holdfast.snapshot.snapshots import Snapshots

WORTH_REGISTERING = 1 << 20


@dataclass(frozen=True)
class Resumed:
    step: int
    in_place: bool = False
    """memory already holds this step, in the arenas that the run goes on with"""
    sequence: int = 0
    arena: Arena | None = None
    """this rank's memory, mapped already, if it was filled from it"""


@dataclass(frozen=True)
class Filled:
    source: str
    """memory, peer, mixed or disk"""
    arena: Arena | None = None


@dataclass(frozen=True)
class Location:
    """One rank's snapshot somewhere in the run's memory."""

    node: str
    file: str
    slot: int
    rank: int
    plan: str
    generation: int
    step: int
    sequence: int
    peer: bool


Candidate = dict[int, list[Location]]
"""rank → where its snapshot of one step lies, the own node first"""


def restore(snapshots: "Snapshots") -> Resumed:
    begin = time.perf_counter()
    rank_group = snapshots.rank_group
    # A step that a rank has not done was not done; a desk that nobody sat at before does not count.
    reached = min(filter(None, rank_group.gather(snapshots.reached)), default=0)
    suspect = rank_group.gather(snapshots.nan_guard.suspected() if rank_group.rank == 0 else None)[0]
    if rank_group.first_here:
        # Others may pull from it; one that was killed a moment ago still seemed to be there.
        start_keeper(snapshots.run_memory)
    held, complete, highest, unusable = _everything_held(snapshots)
    disk: list[list[Any]] = rank_group.gather(_on_disk(snapshots.folder) if rank_group.rank == 0 else None)[0]
    candidates: list[tuple[int, int, Any]] = [(key[0], 1, key) for key in held]
    candidates += [(step, 0, path) for step, path in disk]

    def preference(entry: tuple[int, int, Any]) -> tuple[bool, int, int]:
        """Newest first, memory before disk; what is suspected of leading to NaN only if there is nothing else."""
        return suspect is None or entry[0] < suspect, *entry[:2]

    for step, in_memory, candidate in sorted(candidates, key=preference, reverse=True):
        if in_memory:
            filled = _fill_from_memory(snapshots, held[candidate], complete[candidate])
        else:
            filled = _fill_from_disk(snapshots, candidate)
        if filled is not None:
            if suspect is not None:
                _deal_with_suspect(snapshots, suspect, step)
            _forget_the_rest(snapshots, step if in_memory else None)
            lost = max(0, reached - step)
            seconds = time.perf_counter() - begin
            snapshots.event("resumed", source=filled.source, step=step, steps_lost=lost, seconds=round(seconds, 4))
            redo = f"; {lost} step{'s' * (lost != 1)} to redo" if lost else ""
            log(f"resumed from {filled.source} at step {step} in {seconds:.2f} s{redo}")
            if rank_group.rank == 0:
                snapshots.nan_guard.resumed_from(step)
            return Resumed(step, in_memory == 1, highest, filled.arena)
    if disk:
        raise HoldfastError(
            f"no checkpoint in {snapshots.folder} can be used (see the lines above); remove them to start over at step 0"
        )
    if candidates or unusable:
        raise HoldfastError(
            f"memory holds state of this run that cannot be used ({'; '.join(unusable) or 'see the lines above'}), and no "
            f"checkpoint is on disk. To give it up and start over at step 0, remove {snapshots.run_memory.path}"
        )
    if rank_group.rank == 0:
        snapshots.nan_guard.resumed_from(None)
    _forget_the_rest(snapshots, None)
    return Resumed(0, sequence=highest)


def _deal_with_suspect(snapshots: "Snapshots", suspect: int, step: int) -> None:
    """Two resumed runs met NaN soon after step `suspect`; now the run has `step` to continue from."""
    if snapshots.rank_group.rank != 0:
        return
    if step >= suspect:
        log(
            f"WARNING: two runs that resumed near step {suspect} met NaN soon after, and no older state can be used; "
            f"continuing from step {step}. Look at the data and the learning rate"
        )
        return
    aside = snapshots.nan_guard.quarantine()
    names = ", ".join(str(path) for path in aside) or "snapshots in memory"
    log(
        f"WARNING: two runs that resumed near step {suspect} met NaN soon after: {names} set aside, going back to step {step}"
    )
    reason = f"two resumed runs met NaN within {NEAR} steps"
    snapshots.event("snapshot", step=suspect, outcome="set aside", reason=reason, paths=[str(path) for path in aside])


Key = tuple[int, int]
"""step, generation"""


def _everything_held(snapshots: "Snapshots") -> tuple[dict[Key, Candidate], dict[Key, list[list[int]]], int, list[str]]:
    """Every complete candidate over all nodes, the sets of ranks that make it so, the highest sequence number so far, and what
    of the run is there and cannot be used."""
    rank_group, run_memory = snapshots.rank_group, snapshots.run_memory
    mine: list[dict[str, Any]] = []
    damaged: list[str] = []
    if rank_group.first_here:
        for peer, paths in ((False, run_memory.arenas()), (True, run_memory.peer_arenas())):
            for arena in open_arenas(paths, run_memory.key, damaged.append):
                mine += _list_slots(arena, run_memory.node, peer, damaged.append)
                arena.close()
    everyone = rank_group.gather([mine, damaged])
    unusable = [message for _, messages in everyone for message in messages]
    for message in unusable if rank_group.rank == 0 else ():
        log(f"{message}; it is left out")
        snapshots.event("snapshot", outcome="rejected", reason=message)
    told = [entry for entries, _ in everyone for entry in entries]
    complete = {(e["step"], e["generation"]): e["complete"] for e in told}
    found: dict[Key, Candidate] = defaultdict(lambda: defaultdict(list))
    for entry in sorted(told, key=lambda entry: entry["peer"]):
        fields = {name: entry[name] for name in Location.__dataclass_fields__}
        found[entry["step"], entry["generation"]][entry["rank"]].append(Location(**fields))
    whole = {key: candidate for key, candidate in found.items() if _whole(complete[key], candidate)}
    if not whole and max(rank_group.gather(snapshots.page["committed"])) > 0:
        # All ranks once held a step; a crash before that leaves nothing to lose.
        lacking = ", ".join(f"step {step} of ranks {sorted(found[step, plan])} alone" for step, plan in sorted(found))
        unusable.append(f"no step is complete: {lacking}")
    return whole, complete, max((entry["sequence"] for entry in told), default=0), unusable


def _list_slots(arena: Arena, node: str, peer: bool, on_damage: Callable[[str], None]) -> list[dict[str, Any]]:
    listed = []
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
        copy = Location(
            node, arena.path.name, index, arena.rank, arena.plan, arena.generation, header.step, header.sequence, peer
        )
        listed.append({**copy.__dict__, "complete": complete})
    return listed


def _fill_from_memory(snapshots: "Snapshots", candidate: Candidate, complete: Sequence[Sequence[int]]) -> Filled | None:
    """Verifies a candidate and fills the state from it; None, with a word about it, if too little of it is whole."""
    rank_group, run_memory = snapshots.rank_group, snapshots.run_memory
    opened = Opened(run_memory, snapshots.state)
    bad = _verify_here(snapshots, opened, [copy for copies in candidate.values() for copy in copies])
    good: Candidate = {
        rank: sound
        for rank, copies in candidate.items()
        if (sound := [copy for copy in copies if (copy.node, copy.file, copy.slot) not in bad])
    }
    step = next(iter(candidate.values()))[0].step
    ranks = _whole(complete, good)
    if ranks is None:
        log(f"the snapshot of step {step} in memory cannot be used; trying the next one")
        snapshots.event("snapshot", step=step, outcome="rejected", reason="; ".join(sorted(bad.values()))[:1000])
        opened.close_all_but(None)
        return None
    source = Tensors(f"the snapshot of step {step}", {})
    small: dict[int, dict[str, Any]] = {}
    trouble: Exception | None = None
    nodes = set(rank_group.nodes)
    pulls = any(not nodes <= {copy.node for copy in good[rank]} for rank in ranks)
    if pulls and rank_group.first_here:
        (run_memory.path / SERVE).touch(mode=0o600)
    try:
        opened.register_ahead(good.get(rank_group.rank, ()))
        small = {rank: opened.add(source, good[rank]) for rank in ranks}
        if (
            rank_group.rank in good
            and rank_group.rank not in small
            and any(copy.node == run_memory.node for copy in good[rank_group.rank])
        ):
            small[rank_group.rank] = opened.add(None, good[rank_group.rank])
    except (HoldfastError, OSError, struct.error) as error:
        trouble = error
    troubles = [message for message in rank_group.gather(str(trouble) if trouble else None) if message]
    if pulls and rank_group.first_here:
        (run_memory.path / SERVE).unlink(missing_ok=True)
    if troubles:  # a peer that does not answer, say: an older state is better than none
        log(f"the snapshot of step {step} in memory cannot be used; trying the next one: {troubles[0]}")
        snapshots.event("snapshot", step=step, outcome="rejected", reason=troubles[0][:1000])
        opened.close_all_but(None)
        return None
    facts = small[ranks[0]]
    with snapshots.state.undone_on_error():
        try:
            load_into(source, snapshots.state, facts["padded_rows"])
        except Exception as error:
            trouble = error
        finally:
            own = opened.close_all_but(rank_group.rank)
        agree(trouble, rank_group.group)
        refuse_unused(source.tensors, snapshots.state, source.origin, rank_group.group)
    snapshots.state.apply_optimizer_settings(merge_settings([small[rank]["optimizer"] for rank in sorted(small)]))
    mine = small.get(rank_group.rank) if facts["world"] == rank_group.world else None
    _apply_small(snapshots, (mine or small[min(small)])["extra"], mine["random"] if mine else None)
    return Filled(_source_name({rank: good[rank] for rank in ranks}), own)


def _whole(complete: Sequence[Sequence[int]], candidate: Candidate) -> list[int] | None:
    """The first set of ranks that holds the whole state and is there."""
    return next((sorted(ranks) for ranks in complete if set(ranks) <= set(candidate)), None)


def _source_name(chosen: Candidate) -> str:
    peers = [copies[0].peer for copies in chosen.values()]
    return "peer" if all(peers) else "mixed" if any(peers) else "memory"


def _verify_here(
    snapshots: "Snapshots", opened: "Opened", copies: Sequence[Location]
) -> dict[tuple[str, str, int], str]:
    """What lies on this node is verified by the ranks of this node together; every rank learns of all that is damaged."""
    rank_group, run_memory = snapshots.rank_group, snapshots.run_memory
    share, of = rank_group.here.index(rank_group.rank), len(rank_group.here)
    bad = []
    for copy in copies:
        if copy.node != run_memory.node:
            continue
        try:
            slot = opened.arena(run_memory.path / copy.file).slot(copy.slot)
            header = slot.header()
            if header.state != READY or header.step != copy.step:
                raise DamagedError(f"{slot.origin} no longer holds step {copy.step}")
            # numpy lets go of the interpreter lock while it sums
            slot.verify(header, share, of, threads=max(1, min(8, (os.cpu_count() or 1) // of)))
        except (DamagedError, FileNotFoundError) as error:
            bad.append([copy.node, copy.file, copy.slot, str(error)])
            log(str(error))
    return {(node, file, slot): why for told in rank_group.gather(bad) for node, file, slot, why in told}


class _Memory:
    """A verified slot's payload as a content that tensors are assembled from; known to CUDA if much of it goes there."""

    def __init__(self, slot: Slot, device: torch.device | None) -> None:
        self._slot, self._device = slot, device

    def view(self, begin: int, end: int) -> Bytes:
        if self._device is not None and end - begin >= WORTH_REGISTERING:
            self._slot.register(self._device)
        return self._slot.payload[begin:end]


class Opened:
    """The slots that a state is filled from: mapped, or pulled from another node."""

    def __init__(self, run_memory: RunMemory, state: State) -> None:
        self._place = run_memory
        devices = {parameter.device for parameter in state.parameters.values() if parameter.is_cuda}
        self._device = next(iter(devices), None)
        self._arenas: dict[Path, Arena] = {}
        self._registering: list[threading.Thread] = []

    def arena(self, path: Path) -> Arena:
        """Mapped once, however often it is asked for: the pages that were verified are there when they are copied."""
        if path not in self._arenas:
            self._arenas[path] = Arena(path)
        return self._arenas[path]

    def register_ahead(self, copies: Sequence[Location]) -> None:
        """Makes this rank's own memory known to CUDA while the state is got ready for it.

        Not while it is verified: to map pages and to register them at once takes four times as long as one after the other.
        """
        for copy in copies:
            if self._device is not None and copy.node == self._place.node and not copy.peer:
                slot = self.arena(self._place.path / copy.file).slot(copy.slot)
                thread = threading.Thread(target=slot.register, args=(self._device,))
                thread.start()
                self._registering.append(thread)

    def add(self, source: Tensors | None, copies: Sequence[Location]) -> dict[str, Any]:
        """Adds one rank's pieces to the source; the rank's small state."""
        run_memory = self._place
        copy = next((c for c in copies if c.node == run_memory.node), copies[0])
        path = (
            run_memory.path / copy.file
            if copy.node == run_memory.node
            else pull(run_memory, copy.node, copy.file, copy.slot)
        )
        slot = self.arena(path).slot(copy.slot)
        header = slot.header()
        if source is not None:
            layout = slot.layout(header)
            content = _Memory(slot, self._device)
            for piece, start in zip(layout.pieces, layout.starts, strict=True):
                source.tensors[piece.name] = (piece.dtype, piece.global_shape)
                source.add(piece, start, content)
        return slot.small_state(header)

    def close_all_but(self, rank: int | None) -> Arena | None:
        """Lets go of what was opened, but for this rank's own memory: to map it takes long, and the run goes on with it."""
        for thread in self._registering:
            thread.join()
        own = None
        for path, arena in self._arenas.items():
            if own is None and arena.rank == rank and path in self._place.arenas():
                own = arena
                continue
            arena.close()
            if path.name.startswith(PULLED):
                path.unlink()
        return own


def _on_disk(folder: Path) -> list[list[Any]]:
    return [[step, str(path)] for step, path in checkpoints_in(folder)]


def _fill_from_disk(snapshots: "Snapshots", path: str) -> Filled | None:
    state = snapshots.state
    try:
        shared = load(path, state)
    except (HoldfastError, OSError) as error:
        log(f"checkpoint {path} cannot be used, trying the one before: {error}")
        snapshots.event("snapshot", outcome="rejected", reason=str(error)[:1000])
        return None
    extra = state.per_rank.get("extra", shared.get("extra", {}))
    _apply_small(snapshots, extra, state.per_rank.get("random"))
    return Filled("disk")


def _apply_small(snapshots: "Snapshots", extra: dict[str, Any], random: Any) -> None:
    snapshots.extra.set(extra)
    if random is not None:
        set_random_state(decode(random))


def _forget_the_rest(snapshots: "Snapshots", keep: int | None) -> None:
    """Memory of steps that the run does not continue from is emptied, so that nobody takes it for newer than what follows."""
    snapshots.rank_group.gather(None)
    if snapshots.rank_group.first_here:
        run_memory = snapshots.run_memory
        for arena in open_arenas(run_memory.arenas() + run_memory.peer_arenas(), run_memory.key):
            forget(arena, keep)
            arena.close()
    snapshots.rank_group.gather(None)
