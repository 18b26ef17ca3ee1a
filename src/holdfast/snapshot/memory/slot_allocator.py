"""A rank's own memory: which live tensors it copies, into which arena, into which slot of it.

The invariants: a slot that is pinned, that holds the newest step all ranks have, or one that may become it, is never
chosen; the rank's status page lists the steps that are READY; live tensors are the ones that the model and optimizer have now (a
tensor that was replaced is noticed); a changed layout gets a new arena beside the old one.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.collective import agreed
from holdfast.checkpoint.layout import ShardLayout, TensorSlice, lay_out
from holdfast.checkpoint.plan import complete_sets, decode_held, divide, encode_held, plan_hash, ranks_to_persist
from holdfast.checkpoint.state import Item, State
from holdfast.snapshot.memory.arena import DISK, PEER, RESERVED, SLOTS, Arena, arena_name, file_bytes, slots_at_most
from holdfast.snapshot.memory.copier import Copier, Copy
from holdfast.snapshot.memory.ready_slot import find_ready
from holdfast.snapshot.memory.run_memory import RunMemory, opened_arenas
from holdfast.snapshot.memory.slot import EMPTY, NOTHING, READY, WRITING, DamagedError, Sizes, SlotHeader, sizes_for
from holdfast.snapshot.memory.tensor_watch import TensorWatch
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.snapshot.ranks.status_page import NOT_HELD, RankStatus
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log


class SlotAllocator:
    def __init__(self, state: State, rank_group: RankGroup, mode: str, page: RankStatus) -> None:
        self._state, self._rank_group, self._run_memory = state, rank_group, rank_group.run_memory
        self._mode, self._page = mode, page
        self.arena: Arena | None = None
        self.plan: dict[str, Any] = {"writers": [], "complete": [], "token": ""}
        """What the keeper must know of the plan: whose slices make up the state, and a name for this start of the run."""
        self._copied_to_peers = mode == "peer" and not rank_group.one_node
        self._shipping: int | None = None
        self._sequence = 0
        self._adopted: Arena | None = None
        self._layout = lay_out([])
        self._last: Copy | None = None
        self.copier: Copier | None = None
        self._watch: TensorWatch | None = None
        self._held: list[Any] = []
        self._stale = False

    def resume(self, arena: Arena | None, sequence: int) -> None:
        """After a restore. `arena`: this rank's memory, if the state was loaded from it; it stays mapped if the plan is the same.
        `sequence`: the highest sequence number in memory."""
        self._shipping, self._sequence = None, sequence
        self._adopt(arena)
        self._publish_held()

    def _adopt(self, arena: Arena | None) -> None:
        if self._adopted is not None:
            self._adopted.close()
        self._adopted = arena

    def changed(self) -> bool:
        """Whether the tensors differ in number, shape or placement from those that all ranks agreed on, or something removed the
        memory: `make_plan` is needed."""
        self._stale = self._watch is None or self._watch.replaced()
        if self._watch is None or self.memory_removed():
            return True
        if not self._stale:
            return False
        try:
            return encode_held(item.held for item in self._state.items()) != self._held
        except HoldfastError:
            return True  # make_plan raises it, on all ranks

    def memory_removed(self) -> bool:
        return self.arena is not None and (self.arena.is_removed() or not self._page.path.exists())

    def unmap_removed(self) -> None:
        """Gives up memory that was removed, so that there is room for what the next plan makes."""
        if self.arena is not None and self.memory_removed():
            if self.copier is not None:
                self.copier.close()
            self.arena.close()
            self.copier = self.arena = self._last = None

    def plain_numbers(self) -> dict[str, dict[str, Any]] | None:
        """The optimizer state that is a plain number, as `changed` found it; None if it is not known."""
        return None if self._stale or self._watch is None else self._watch.plain_numbers()

    def make_plan(self, small_size: Callable[[Mapping[str, Any]], int]) -> None:
        """Agrees with all ranks on who holds what, and makes the memory for it. Collective."""
        with agreed(self._rank_group.group):
            items = self._state.items()
        self._held = encode_held(item.held for item in items)
        self._layout = self._agree_on_plan(self._held, small_size(self.plan))
        self._renew_copier(items)

    def _renew_copier(self, items: Sequence[Item]) -> None:
        self._watch = TensorWatch(self._state)
        self._stale = False
        if self.copier is not None:
            self.copier.close()
        self.copier = Copier(items, self._layout, self._on_ready)

    def _on_ready(self, slot: int, step: int) -> None:
        self._page.set_held(slot, step)
        self._page["ready"] = step

    def _publish_held(self) -> None:
        """Stores on the status page what the slots hold, after they were opened or emptied."""
        if self.arena is not None:
            for index, header in enumerate(self.arena.headers()):
                self._page.set_held(index, header.step if header.state == READY else NOT_HELD)

    def begin(
        self,
        step: int,
        small: dict[str, Any],
        random: dict[str, Any],
        committed: int | None,
        candidates: Collection[int],
    ) -> Copy | None:
        """Starts a copy of the tensors as `changed` found them; None if there is no slot for it. The plan fits."""
        if self._stale or self._grow():
            self._renew_copier(self._state.items())
        assert self.arena is not None and self.copier is not None
        self._sequence += 1
        index = self._free_slot(self.arena, committed, candidates)
        if index is None:
            return None
        slot = self.arena.slot(index)
        self._page.set_held(index, NOT_HELD)
        slot.store(SlotHeader(WRITING, self._sequence, step, 0, 0, 0, 0, time.time()))
        self._last = Copy(slot, self._sequence, step, small, random, index)
        self.copier.start(self._last)
        return self._last

    def release(self, copy: Copy) -> None:
        """See `Copier.release`."""
        assert self.copier is not None
        self.copier.release(copy)

    def _grow(self) -> bool:
        """Replaces the arena by one with more room if the last small state did not fit; False if it did, while a slot is being
        written to disk, or if memory is short. It happens at a different step on each rank, so each acts alone."""
        if self._last is None or self.arena is None or self._last.small_bytes <= self.arena.sizes.meta or self.pinned():
            return False
        try:
            self.arena = self.arena.grown(self._last.small_bytes)
        except HoldfastError as error:
            log(f"the small state has outgrown its memory: {error}")
            return False
        return True

    def pin(self, step: int, pinned: bool = True) -> bool:
        """Keeps the slot of this step from being overwritten, until the keeper has written it to disk."""
        found = find_ready(self.arena, step) if self.arena is not None else None
        if found is not None:
            found.arena.pin(found.index, pinned)
        return found is not None

    def choose_for_peers(self, committed: int | None, shipped: int | None) -> None:
        """Pins the step that the keeper copies to the peer node next, and the one copied before.

        All ranks get the same arguments, so all nodes copy the same step, and keep their own slot of it until all have copied a
        newer one: what is left when a node is lost is of one step.
        """
        if not self._copied_to_peers or committed is None or committed < 0 or self._shipping not in (None, shipped):
            return
        steps = (self._shipping, committed)
        self._shipping = committed
        if self.arena is not None:
            for index, header in enumerate(self.arena.headers()):
                self.arena.pin(index, header.state == READY and header.step in steps, PEER)

    def pinned(self) -> bool:
        """Whether a slot of this rank waits for the disk."""
        return self.arena is not None and any(self.arena.pinned(index, DISK) for index in range(SLOTS))

    def close(self) -> None:
        if self.copier is not None:
            self.copier.close()
            self.copier = self._watch = None
        self._adopt(None)
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _free_slot(self, arena: Arena, committed: int | None, candidates: Collection[int]) -> int | None:
        headers = arena.headers()
        pinned = [arena.pinned(index) for index in range(SLOTS)]
        for index in range(_usable(pinned), SLOTS):
            kept = headers[index].step in (committed, *candidates) or pinned[index]
            if headers[index].state != EMPTY and not kept:
                self._page.set_held(index, NOT_HELD)
                arena.slot(index).store(NOTHING)
                if self.copier is not None:
                    self.copier.drop_slot(arena.slot(index))
                arena.slot(index).unregister()
                arena.release(index)
        usable = slots_to_use(headers, pinned, committed, candidates)
        return next((index for index in usable if arena.reserve(index)), None)

    def _agree_on_plan(self, held: list[Any], small_bytes: int) -> ShardLayout:
        """Decides with all ranks who keeps what, and makes the memory for it."""
        rank_group = self._rank_group
        replica_set = [rank_group.nodes[rank_group.rank] if self._mode == "node" else None, self._state.replica_set]
        gathered = rank_group.gather({"held": held, "replica_set": replica_set, "small": small_bytes})
        kept = divide(
            [decode_held(entry["held"]) for entry in gathered], [tuple(entry["replica_set"]) for entry in gathered]
        )
        small_bytes = max(entry["small"] for entry in gathered)
        path = self._run_memory.path / arena_name(rank_group.rank, rank_group.world, plan_hash(kept))
        arena = self._open(path, plan_hash(kept))
        generation, token = self._agree_on_generation(arena)
        with agreed(rank_group.group):
            if arena is None:
                arena = self._create(path, kept, small_bytes, generation)
            elif arena.sizes.meta < small_bytes:
                arena = arena.grown(small_bytes)
            if arena.generation != generation:
                arena.set_generation(generation)
        if self.arena is not None:
            self.arena.close()
        self.arena = arena
        self._page.clear_held()
        self._publish_held()
        rank_group.gather(None)  # before this, a status page may describe slots of an older plan
        replica_sets = [str(entry["replica_set"]) for entry in gathered]
        self.plan = {"writers": ranks_to_persist(kept), "complete": complete_sets(kept, replica_sets), "token": token}
        return lay_out(kept[rank_group.rank])

    def _agree_on_generation(self, arena: Arena | None) -> tuple[int, str]:
        """A number that rises with every new plan and is the same on all ranks: a node that was lost gets that of the others.
        With it, a name for this start of the run."""
        highest = 0
        if self._rank_group.first_on_node:
            paths = self._run_memory.arenas() + self._run_memory.peer_arenas()
            with opened_arenas(paths, self._run_memory.key) as others:
                highest = max((other.generation for other in others), default=0)
        own = arena.generation if arena is not None else None
        gathered = self._rank_group.gather([own, highest, secrets.token_hex(8)])
        known = {generation for generation, _, _ in gathered if generation is not None}
        highest = max(generation for _, generation, _ in gathered)
        return (highest if known == {highest} else highest + 1), gathered[0][2]

    def _create(self, path: Path, kept: Sequence[Sequence[TensorSlice]], small_bytes: int, generation: int) -> Arena:
        rank_group = self._rank_group
        sizes = {rank: sizes_for(lay_out(kept[rank]), small_bytes) for rank in rank_group.node_ranks}
        if rank_group.first_on_node:
            _check_memory(self._run_memory, sizes.values(), slots_at_most(self._copied_to_peers))
        rank, world = rank_group.rank, rank_group.world
        return Arena.create(path, sizes[rank], self._run_memory.key, plan_hash(kept), rank, world, generation)

    def _open(self, path: Path, plan: str) -> Arena | None:
        """The arena of this plan that exists already, if it can be used."""
        arena, self._adopted = self._adopted, None
        if arena is not None and arena.path != path:
            arena.close()
            arena = None
        try:
            arena = arena or Arena(path)
        except (OSError, DamagedError):
            return None
        if (arena.plan, arena.run) != (plan, self._run_memory.key):
            arena.close()
            return None
        arena.populate = True
        return arena


def slots_to_use(
    headers: Sequence[SlotHeader], pinned: Sequence[bool], committed: int | None, candidates: Collection[int] = ()
) -> list[int]:
    """The slots that may be overwritten, best first: not pinned, neither the newest common step nor a candidate to become it;
    beyond the first two as many as are pinned.

    Of two slots that hold one of these steps the younger one is kept.
    """
    ready = [header for header in headers if header.state == READY]
    kept = {max((h.sequence for h in ready if h.step == step), default=0) for step in (committed, *candidates)}
    free = [
        (header.state == READY, header.sequence, index)
        for index, header in enumerate(headers[: _usable(pinned)])
        if not pinned[index] and not (header.state == READY and header.sequence in kept)
    ]
    return [index for _, _, index in sorted(free)]


def _usable(pinned: Sequence[bool]) -> int:
    return min(SLOTS, RESERVED + sum(pinned))


def _check_memory(run_memory: RunMemory, arenas: Collection[Sizes], slots: int) -> None:
    """Refuses memory that is too small before anything is reserved, with the size that `slots` per rank need."""
    needed = sum(file_bytes(sizes, RESERVED) for sizes in arenas)
    free = shutil.disk_usage(run_memory.path).free
    if needed > free:
        most = sum(file_bytes(sizes, slots) for sizes in arenas) + run_memory.memory_bytes()
        mebibytes = -(-most // (1 << 20))
        memory = run_memory.path.parent.parent
        raise HoldfastError(
            f"{memory} is too small for the snapshots of this node: two slots need {needed:,} bytes and {free:,} are free. "
            f"Give the container at least {mebibytes} MiB (docker: --shm-size={mebibytes}m, Kubernetes: an emptyDir of medium "
            f"Memory with sizeLimit {mebibytes}Mi at {memory}), or choose another --snapshot-dir"
        )
