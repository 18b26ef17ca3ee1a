"""A rank's own memory: which live tensors it copies, into which arena, into which slot of it.

The invariants: a slot that is pinned, that holds the newest step all ranks have, or one that may become it, is never
chosen; the rank's desk says which steps are READY; live tensors are the ones that the model and optimizer have now (a state
that was replaced is noticed); a changed layout gets a new arena beside the old one.
"""

import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.collective import agree
from holdfast.checkpoint.layout import ShardLayout, TensorSlice, lay_out
from holdfast.checkpoint.plan import complete_sets, divide, plan_hash, ranks_to_persist
from holdfast.checkpoint.state import Item, State
from holdfast.checkpoint.writing import decode_held, encode_held
from holdfast.snapshot.memory.arena import (
    DISK,
    EMPTY,
    NOTHING,
    PEER,
    READY,
    RESERVED,
    SLOTS,
    WRITING,
    Arena,
    DamagedError,
    SlotHeader,
    arena_name,
    sizes_for,
    slots_at_most,
)
from holdfast.snapshot.memory.copier import Copier, Copy
from holdfast.snapshot.memory.ready_slot import find_ready
from holdfast.snapshot.memory.run_memory import RunMemory, open_arenas
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.snapshot.ranks.status_page import NOT_HELD, RankStatus
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log


class SlotAllocator:
    def __init__(self, state: State, rank_group: RankGroup, run_memory: RunMemory, mode: str, page: RankStatus) -> None:
        self._state, self._team, self._place, self._mode, self._page = state, rank_group, run_memory, mode, page
        self.copied = mode == "peer" and not rank_group.one_node
        """What this node holds is copied to another one."""
        self.arena: Arena | None = None
        self.plan: dict[str, Any] = {"writers": [], "complete": [], "token": ""}
        """What the keeper must know of the plan: whose pieces make up the state, and a name for this start of the run."""
        self._adopted: Arena | None = None
        self._layout = lay_out([])
        self._last: Copy | None = None
        self._copier: Copier | None = None
        self._parameters: list[torch.Tensor] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._addresses, self._ids, self._tensor_ids = list[int](), list[int](), list[int]()
        self._held: list[Any] = []
        self._stale = False

    def adopt(self, arena: Arena | None) -> None:
        """Memory of this rank that was opened to resume from: not opened and mapped again, if the plan is still the same."""
        if self._adopted is not None:
            self._adopted.close()
        self._adopted = arena

    def changed(self) -> bool:
        """Whether the tensors differ in number, shape or place from those that all ranks agreed on: `make_plan` is needed."""
        self._stale = self._copier is None or self._replaced()
        if self._copier is None or not self._stale:
            return self._stale
        try:
            return encode_held(self._state.items()) != self._held
        except HoldfastError:
            return True  # make_plan raises it, on all ranks

    def refresh(self) -> None:
        """Copies show the tensors as `changed` found them, and there is room for the small state. The plan fits."""
        if self._stale or (self._outgrown() and self._grow()):
            self._renew_copier(self._state.items())

    def make_plan(self, small_bytes: Callable[[], int]) -> None:
        """Agrees with all ranks on who holds what, and makes the memory for it. Collective."""
        trouble: Exception | None = None
        items: list[Item] = []
        try:
            items = self._state.items()
        except HoldfastError as error:
            trouble = error
        agree(trouble, self._team.group)
        self._held = encode_held(items)
        self._layout = self._agree_on_plan(self._held, small_bytes())
        self._renew_copier(items)

    def _renew_copier(self, items: Sequence[Item]) -> None:
        self._watch()
        self._stale = False
        if self._copier is not None:
            self._copier.close()
        self._copier = Copier(items, self._layout, self._on_ready)

    def _on_ready(self, slot: int, step: int) -> None:
        self._page.set_held(slot, step)
        self._page["ready"] = step

    def publish_held(self) -> None:
        """The desk says what the slots hold, after they were opened or emptied."""
        if self.arena is not None:
            for index, header in enumerate(self.arena.headers()):
                self._page.set_held(index, header.step if header.state == READY else NOT_HELD)

    def begin(
        self,
        step: int,
        sequence: int,
        small: dict[str, Any],
        random: dict[str, Any],
        committed: int | None,
        candidates: Collection[int],
    ) -> Copy | None:
        """Starts a copy; None if there is no slot for it."""
        assert self.arena is not None and self._copier is not None
        index = self._free_slot(self.arena, committed, candidates)
        if index is None:
            return None
        slot = self.arena.slot(index)
        self._page.set_held(index, NOT_HELD)
        slot.store(SlotHeader(WRITING, sequence, step, 0, 0, 0, 0, time.time()))
        self._last = Copy(slot, sequence, step, small, random, index)
        self._copier.start(self._last)
        return self._last

    def _outgrown(self) -> bool:
        """The last small state found no room. Ranks meet this at different steps, so it is each one's own affair."""
        return self._last is not None and self.arena is not None and self._last.small_bytes > self.arena.sizes.meta

    def _grow(self) -> bool:
        """Moves into an arena with more room; False while a slot is being written to disk, or for want of memory."""
        assert self.arena is not None and self._last is not None
        if self.pinned():
            return False
        try:
            self.arena = self.arena.grown(self._last.small_bytes)
        except HoldfastError as error:
            log(f"{error}, which the small state needs now")
            return False
        return True

    def pin(self, step: int, pinned: bool = True) -> bool:
        """Keeps the slot of this step from being overwritten, until the keeper has written it to disk."""
        found = find_ready(self.arena, step) if self.arena is not None else None
        if found is not None:
            found.arena.pin(found.index, pinned)
        return found is not None

    def keep_for_peers(self, steps: Sequence[int | None]) -> None:
        """Of these steps and no others the slots are kept until they are no longer among them."""
        if self.arena is not None:
            for index, header in enumerate(self.arena.headers()):
                self.arena.pin(index, header.state == READY and header.step in steps, PEER)

    def pinned(self) -> bool:
        """A slot of this rank is waiting for the disk."""
        return self.arena is not None and any(self.arena.pinned(index, DISK) for index in range(SLOTS))

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self.adopt(None)
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
                if self._copier is not None:
                    self._copier.forget(arena.slot(index))
                arena.slot(index).unregister()
                arena.release(index)
        usable = slots_to_use(headers, pinned, committed, candidates)
        return next((index for index in usable if arena.reserve(index)), None)

    def _replaced(self) -> bool:
        """A parameter's memory, a buffer or an optimizer's tensor is not the one that was looked at last."""
        if _addresses(self._parameters) != self._addresses:
            return True
        values = self._assignable()
        if list(map(id, values)) == self._ids:
            return False
        # a state that is a mere number is a new object at every step
        return [id(value) for value in values if isinstance(value, torch.Tensor)] != self._tensor_ids

    def _watch(self) -> None:
        self._parameters = list(self._state.parameters.values())
        self._addresses = _addresses(self._parameters)
        self._buffers = [
            (module._buffers, name)
            for model in self._state.models
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._values = self._assignable()  # kept: of an object that is gone another one may take the id
        self._ids = list(map(id, self._values))
        self._tensor_ids = [id(value) for value in self._values if isinstance(value, torch.Tensor)]

    def _assignable(self) -> list[Any]:
        """What anybody may put a new tensor in place of, as it is now: optimizers' states and persistent buffers."""
        states = chain.from_iterable(optimizer.state.values() for optimizer in self._state.optimizers)
        values = list(chain.from_iterable(state.values() for state in states))
        return values + [buffers.get(name) for buffers, name in self._buffers]

    def _agree_on_plan(self, held: list[Any], small_bytes: int) -> ShardLayout:
        """Decides with all ranks who keeps what, and makes the memory for it."""
        rank_group = self._team
        replica_set = [rank_group.nodes[rank_group.rank] if self._mode == "node" else None, self._state.replica_set]
        told = rank_group.gather({"held": held, "replica_set": replica_set, "small": small_bytes})
        kept = divide([decode_held(entry["held"]) for entry in told], [tuple(entry["replica_set"]) for entry in told])
        small_bytes = max(entry["small"] for entry in told)
        path = self._place.path / arena_name(rank_group.rank, rank_group.world, plan_hash(kept))
        arena = self._open(path, plan_hash(kept))
        generation, token = self._agree_on_generation(arena)
        trouble: Exception | None = None
        try:
            if arena is None:
                arena = self._create(path, kept, small_bytes, generation)
            elif arena.sizes.meta < small_bytes:
                arena = arena.grown(small_bytes)
            if arena.generation != generation:
                arena.set_generation(generation)
        except (HoldfastError, OSError) as error:
            trouble = error
        agree(trouble, rank_group.group)
        if self.arena is not None:
            self.arena.close()
        self.arena = arena
        self._page.clear_held()
        self.publish_held()
        rank_group.gather(None)  # before this, a desk may speak of slots of an older plan
        replica_sets = [str(entry["replica_set"]) for entry in told]
        self.plan = {"writers": ranks_to_persist(kept), "complete": complete_sets(kept, replica_sets), "token": token}
        return lay_out(kept[rank_group.rank])

    def _agree_on_generation(self, arena: Arena | None) -> tuple[int, str]:
        """A number that rises with every new plan and is the same on all ranks: a node that was lost joins the others'. Beside it
        a name for this start of the run."""
        highest = 0
        if self._team.first_here:
            for other in open_arenas(self._place.arenas() + self._place.peer_arenas(), self._place.key):
                highest = max(highest, other.generation)
                other.close()
        told = self._team.gather([arena.generation if arena is not None else None, highest, secrets.token_hex(8)])
        known = {generation for generation, _, _ in told if generation is not None}
        highest = max(generation for _, generation, _ in told)
        return (highest if known == {highest} else highest + 1), told[0][2]

    def _create(self, path: Path, kept: Sequence[Sequence[TensorSlice]], small_bytes: int, generation: int) -> Arena:
        rank_group = self._team
        sizes = [sizes_for(lay_out(kept[rank]), small_bytes) for rank in rank_group.here]
        if rank_group.first_here:
            _check_memory(self._place, sizes, slots_at_most(self.copied))
        own = sizes[rank_group.here.index(rank_group.rank)]
        return Arena.create(path, own, self._place.key, plan_hash(kept), rank_group.rank, rank_group.world, generation)

    def _open(self, path: Path, plan: str) -> Arena | None:
        """The arena of this plan that is there already, if it can be used."""
        arena, self._adopted = self._adopted, None
        if arena is not None and arena.path != path:
            arena.close()
            arena = None
        try:
            arena = arena or Arena(path)
        except (OSError, DamagedError):
            return None
        if (arena.plan, arena.run) != (plan, self._place.key):
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


def _check_memory(run_memory: RunMemory, wanted: Sequence[Any], slots: int) -> None:
    """Refuses, with the exact size to ask for, before anything is reserved; that is for `slots`, a peer's among them."""
    needed = sum(sizes.file(2) for sizes in wanted)
    usage = os.statvfs(run_memory.path)
    free = usage.f_bavail * usage.f_frsize
    if needed > free:
        most = sum(sizes.file(slots) for sizes in wanted) + run_memory.memory_bytes()
        memory = run_memory.path.parent.parent
        raise HoldfastError(
            f"{memory} is too small for the snapshots of this node: two slots need {needed:,} bytes and {free:,} are free. "
            f"Give the container at least {-(-most // (1 << 20))} MiB (docker: --shm-size={-(-most // (1 << 20))}m, Kubernetes: "
            f"an emptyDir of medium Memory with sizeLimit {-(-most // (1 << 20))}Mi at {memory}), or take snapshots elsewhere"
        )


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t._local_tensor.data_ptr() if isinstance(t, DTensor) else t.data_ptr() for t in tensors]
