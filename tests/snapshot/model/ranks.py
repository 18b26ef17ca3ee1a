"""Two ranks, their slots, the keeper and the disk, as a model for the explorer.

Modelled: ranks at any speed within `drift` steps; a copy that ends at any time; the look at the other rank and the choice of a
slot as separate actions; the collective of several nodes in place of the look (`nodes=2`); the pins, the request and the
keeper's actions one by one; `holdfast persist`; the keeper killed and replaced; all ranks killed at any state and restarted from
memory or disk. The decisions are the real ones: `RankGroup.finish_exchange`, `RankStatus.held` and `can_hold`,
`SlotAllocator._free_slot` with `slots_to_use`; the limit of a wait may pass at any time.

Not modelled: torn stores (a header has a checksum), damage, changed plans, copies to peer nodes, the agreement of several
keepers on a step, retention (see files.py), time.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from holdfast.snapshot.memory.slot import EMPTY, NOTHING, READY, WRITING, SlotHeader
from holdfast.snapshot.memory.slot_allocator import SlotAllocator
from holdfast.snapshot.ranks.rank_group import Exchange, RankGroup
from holdfast.snapshot.ranks.status_page import _FIELDS, NOT_HELD, SLOT_WORDS, RankStatus

SLOTS = 3
NO_PINS = (False,) * SLOTS


class Slot(NamedTuple):
    state: int = EMPTY
    step: int = 0
    sequence: int = 0


class Rank(NamedTuple):
    step: int = 0
    slots: tuple[Slot, ...] = (Slot(),) * SLOTS
    disk_pins: tuple[bool, ...] = NO_PINS
    keeper_pins: tuple[bool, ...] = NO_PINS
    ready: int = -1
    given_up: int = -1
    committed: int | None = None
    candidates: tuple[int, ...] = ()
    phase: str = "trains"
    """Or `exchanges` (several nodes: waits for the exchange), or `begins` (has looked at the others, has chosen no slot yet)."""
    announced: tuple[int, ...] = ()
    """Several nodes: what its last two commits announced."""
    commits: int = 0

    @property
    def pins(self) -> list[bool]:
        return [a or b for a, b in zip(self.disk_pins, self.keeper_pins, strict=True)]

    @property
    def copies(self) -> bool:
        return any(slot.state == WRITING for slot in self.slots)

    @property
    def held(self) -> set[int]:
        return {slot.step for slot in self.slots if slot.state == READY}

    def slot_of(self, step: int) -> int | None:
        found = [(slot.sequence, i) for i, slot in enumerate(self.slots) if (slot.state, slot.step) == (READY, step)]
        return max(found)[1] if found else None

    def pin(self, which: str, step: int) -> "Rank":
        pins = list(getattr(self, which))
        index = self.slot_of(step)
        if index is not None:
            pins[index] = True
        return self._replace(**{which: tuple(pins)})

    def unpin(self, which: str, step: int) -> "Rank":
        pins = zip(getattr(self, which), self.slots, strict=True)
        return self._replace(**{which: tuple(pinned and slot.step != step for pinned, slot in pins)})


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    keeper: str = "idle"
    """dead, idle, pinned, published, unpinned"""
    writes: int | None = None
    """The step that the keeper works on."""
    for_operator: bool = False
    """The keeper works for `holdfast persist`, not for a save of the ranks."""
    request: int | None = None
    """The step that the ranks asked to save, as a file in memory."""
    saving: int | None = None
    """The step that the ranks are about to pin and ask for."""
    persist: bool = False
    """An operator asks for the newest step."""
    asked: int = 0
    """The step that the ranks asked to save last."""
    lost: bool = False
    """A save that was asked for was given up, and no rank had died."""
    restarted: bool = False
    ended: bool = False
    """The ranks have exited with 0."""
    disk: int = 0
    best: int = 0
    """The newest step that all ranks have ever held, or that is on disk."""
    saves: int = 1
    persists: int = 1
    crashes: int = 1
    kills: int = 1


@dataclass(frozen=True)
class Rules:
    """Sizes, and the defects that the explorer must find."""

    steps: int = 3
    drift: int = 1
    nodes: int = 1
    exact_holding: bool = True
    candidates: bool = True
    clears_pins_of_dead_keeper: bool = True
    request_last: bool = True
    at_once: bool = False
    """A rank looks and begins in one action: the moment in between lasts microseconds, and to bound how far the common step may
    fall behind, it must not be hit at every step."""
    lag: int | None = None
    """How many steps all ranks may be ahead of the newest common one."""


def common(ranks: tuple[Rank, ...]) -> set[int]:
    return set.intersection(*(rank.held for rank in ranks))


class ModelStatus(RankStatus):
    """The words of a rank as they are in a state; the rules that read them are those of RankStatus."""

    def __init__(self, rank: Rank) -> None:
        self._words: Any = [0] * len(_FIELDS)
        self["ready"], self["skipped_step"] = rank.ready, rank.given_up
        for slot in range(SLOT_WORDS):
            held = slot < SLOTS and rank.slots[slot].state == READY
            self.set_held(slot, rank.slots[slot].step if held else NOT_HELD)

    def owner_alive(self) -> bool:
        return True


class LooseStatus(ModelStatus):
    """The defect: a newer step counts as holding an older one."""

    def held(self) -> set[int]:
        return set(range(1, max(super().held(), default=0) + 1))


@functools.lru_cache(maxsize=1 << 18)
def look(ranks: tuple[Rank, ...], index: int, ready: int, exact: bool) -> Exchange:
    rank_group = object.__new__(RankGroup)
    rank_group.rank, rank_group.one_node, rank_group._wait_seconds = index, True, 0.0
    rank_group._pages = {i: (ModelStatus if exact else LooseStatus)(rank) for i, rank in enumerate(ranks)}
    return rank_group.finish_exchange(ready)


@functools.lru_cache(maxsize=1 << 12)
def exchange(announced_steps: tuple[int, ...], ready: int) -> Exchange:
    """What a rank learns from the all-reduce of what all ranks announced."""
    rank_group = object.__new__(RankGroup)
    rank_group.one_node = False
    lowest = [min(announced_steps), min(-one for one in announced_steps), 0, 0, 0, 0, 0]
    rank_group._pending = (SimpleNamespace(wait=lambda: None), torch.tensor(lowest, dtype=torch.int64))
    return rank_group.finish_exchange(ready)


@functools.lru_cache(maxsize=1 << 18)
def choose(
    slots: tuple[Slot, ...], pins: tuple[bool, ...], committed: int | None, candidates: tuple[int, ...]
) -> tuple[int | None, tuple[Slot, ...]]:
    """The slot that SlotAllocator overwrites next, and the slots after it has given memory back."""
    after = list(slots)

    def empty(index: int) -> Any:
        return SimpleNamespace(store=lambda header: after.__setitem__(index, Slot()), unregister=lambda: None)

    arena: Any = SimpleNamespace(
        headers=lambda: (
            [SlotHeader(s.state, s.sequence, s.step, 0, 0, 0, 0, 0.0) if s.state else NOTHING for s in slots]
            + [NOTHING] * 2
        ),
        pinned=lambda index: index < SLOTS and pins[index],
        slot=empty,
        release=lambda index: None,
        reserve=lambda index: index < SLOTS,
    )
    holder = object.__new__(SlotAllocator)
    holder.copier, holder._page = None, ModelStatus(Rank())
    return holder._free_slot(arena, committed, candidates), tuple(after)


def number(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Sequence numbers count by their order alone: equal situations are equal states."""
    order = sorted({slot.sequence for slot in slots if slot.state})
    return tuple(slot._replace(sequence=order.index(slot.sequence) + 1) if slot.state else Slot() for slot in slots)


def actions(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    for index, rank in enumerate(state.ranks):
        for label, after in _rank_actions(state, index, rank, rules):
            ranks = (*state.ranks[:index], after, *state.ranks[index + 1 :])
            best = max(common(ranks) | {state.best})
            yield f"rank {index} {label}", state._replace(ranks=ranks, best=best)
    yield from _save_actions(state, rules)
    yield from _keeper_actions(state, rules)
    if state.crashes:
        yield "!all ranks die and start again", _restart(state)
    if state.kills and state.keeper != "dead":
        yield "!the keeper dies", state._replace(keeper="dead", writes=None, kills=state.kills - 1)


def _rank_actions(state: State, index: int, rank: Rank, rules: Rules) -> Iterator[tuple[str, Rank]]:
    if rank.copies:
        slots = tuple(slot._replace(state=READY) if slot.state == WRITING else slot for slot in rank.slots)
        step = next(slot.step for slot in rank.slots if slot.state == WRITING)
        yield f"holds step {step}", rank._replace(slots=slots, ready=step)
    elif rank.phase == "begins":
        yield "begins a copy", _begin(rank)
    elif rank.phase == "exchanges":
        announced_steps = [_announced_by(other, rank.commits) for other in state.ranks]
        if None not in announced_steps:
            committed = exchange(tuple(announced_steps), rank.ready).committed
            known = rank.committed if committed is None else committed
            yield "finishes the exchange", rank._replace(committed=known, phase="begins")
    elif state.saving is None and not state.ended:
        slowest = min(other.step for other in state.ranks)
        if rank.step < rules.steps and rank.step - slowest < rules.drift:
            yield f"takes step {rank.step + 1}", _look(state, index, rank._replace(step=rank.step + 1), rules)
        elif rank.step == rules.steps and rank.ready != rank.step:  # close() tries until the last step is held
            again = rank._replace(phase="begins") if rules.nodes > 1 else _look(state, index, rank, rules)
            yield "tries the last step again", again


def _look(state: State, index: int, rank: Rank, rules: Rules) -> Rank:
    if rules.nodes > 1:
        announced = (*rank.announced[-1:], rank.ready)
        return rank._replace(announced=announced, commits=rank.commits + 1, phase="exchanges")
    if rank.ready in (-1, rank.committed):
        return rank._replace(phase="begins")
    ranks = (*state.ranks[:index], rank, *state.ranks[index + 1 :])
    exchange_result = look(ranks, index, rank.ready, rules.exact_holding)
    committed = exchange_result.committed if exchange_result.committed is not None else rank.committed
    candidates = exchange_result.candidates if rules.candidates else ()
    rank = rank._replace(committed=committed, candidates=candidates, phase="begins")
    return _begin(rank) if rules.at_once else rank


def _announced_by(rank: Rank, commit: int) -> int | None:
    behind = rank.commits - commit
    return rank.announced[-1 - behind] if 0 <= behind < len(rank.announced) else None


def _begin(rank: Rank) -> Rank:
    rank = rank._replace(phase="trains")
    chosen, slots = choose(rank.slots, tuple(rank.pins), rank.committed, rank.candidates)
    if chosen is None:
        return rank._replace(slots=slots, given_up=rank.step)
    newest = max((slot.sequence for slot in slots), default=0)
    slots = (*slots[:chosen], Slot(WRITING, rank.step, newest + 1), *slots[chosen + 1 :])
    return rank._replace(slots=number(slots))


def _save_actions(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """The ranks meet, pin the step that all of them hold, and ask the keeper to write it; the last step is always saved."""
    ranks, saving = state.ranks, state.saving
    if saving is not None:
        waiting = [i for i, rank in enumerate(ranks) if not rank.disk_pins[rank.slot_of(saving) or 0]]
        for i in waiting:
            pinned = ranks[i].pin("disk_pins", saving)
            yield f"rank {i} pins step {saving}", state._replace(ranks=(*ranks[:i], pinned, *ranks[i + 1 :]))
        if not waiting:
            yield f"rank 0 asks for step {saving}", state._replace(request=saving, asked=saving, saving=None)
        return
    last = all(rank.step == rules.steps for rank in ranks)
    if last and state.asked == rules.steps and state.request is None and not state.ended:
        yield "the ranks end", state._replace(ended=True)
    step = ranks[0].step
    still = all(r.phase == "trains" and not r.copies and r.step == r.ready == step for r in ranks)
    free = still and state.request is None and state.asked != step and not any(any(r.disk_pins) for r in ranks)
    if free and (state.saves or last):
        yield f"the ranks save step {step}", state._replace(saving=step, saves=max(0, state.saves - 1))


def _keeper_actions(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    held, step = common(state.ranks), state.writes

    def pinned(after: State, step: int) -> State:
        return after._replace(ranks=tuple(rank.pin("keeper_pins", step) for rank in after.ranks))

    def unpinned(*which: str) -> tuple[Rank, ...]:
        ranks = state.ranks
        for name in which if step is not None else ():
            ranks = tuple(rank.unpin(name, step) for rank in ranks)
        return ranks

    if state.persists and not state.persist:
        yield "an operator asks to persist", state._replace(persist=True, persists=0)
    if state.keeper == "dead":
        ranks = state.ranks
        if rules.clears_pins_of_dead_keeper:
            ranks = tuple(rank._replace(keeper_pins=NO_PINS) for rank in ranks)
        yield "a new keeper starts", state._replace(keeper="idle", ranks=ranks)
    elif state.keeper == "idle" and state.request is not None:
        wanted = state.request
        if wanted <= state.disk:  # the keeper before this one wrote it
            ranks = tuple(rank.unpin("disk_pins", wanted) for rank in state.ranks)
            yield f"step {wanted} is on disk already", state._replace(request=None, ranks=ranks)
        elif wanted in held:
            request = wanted if rules.request_last else None
            after = state._replace(keeper="pinned", writes=wanted, request=request, for_operator=False)
            yield f"the keeper begins to write step {wanted}", pinned(after, wanted)
        else:  # after a restart: the ranks ask again
            lost = not state.restarted
            yield f"the keeper gives up step {wanted}", state._replace(request=None, asked=0, lost=lost)
    elif state.keeper == "idle" and state.persist and held:
        newest = max(held)
        if newest <= state.disk:
            yield "the keeper has persisted", state._replace(persist=False)
        else:
            after = state._replace(keeper="pinned", writes=newest, for_operator=True)
            yield f"the keeper begins to persist step {newest}", pinned(after, newest)
    elif state.keeper == "pinned" and step is not None:
        if step in held:
            disk, best = max(state.disk, step), max(state.best, step)
            yield f"step {step} is on disk", state._replace(keeper="published", disk=disk, best=best)
        else:
            ranks = unpinned("keeper_pins")
            yield f"step {step} was overtaken", state._replace(keeper="idle", writes=None, ranks=ranks)
    elif state.keeper == "published" and step is not None:
        ranks = unpinned("keeper_pins", *([] if state.for_operator else ["disk_pins"]))
        yield f"the keeper unpins step {step}", state._replace(keeper="unpinned", ranks=ranks)
    elif state.keeper == "unpinned":
        after = state._replace(keeper="idle", writes=None)
        after = after._replace(persist=False) if state.for_operator else after._replace(request=None)
        yield "the keeper removes the request", after


def _restart(state: State) -> State:
    """All ranks restore the newest step and forget the others, with all pins."""
    held = common(state.ranks)
    step = max(held | {state.disk})
    rank = Rank(step=step, committed=step if step in held else None)

    def kept(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return number(tuple(s if (s.state, s.step) == (READY, step) and step in held else Slot() for s in slots))

    ranks = tuple(rank._replace(slots=kept(old.slots)) for old in state.ranks)
    return state._replace(ranks=ranks, saving=None, asked=0, ended=False, restarted=True, crashes=state.crashes - 1)


def invariant(state: State, rules: Rules) -> str | None:
    newest = max(common(state.ranks) | {state.disk})
    if newest < state.best:
        return f"all ranks held step {state.best}, and now the newest is {newest}"
    if state.ended and state.disk < rules.steps:
        return f"the run ended with 0 and step {rules.steps} is not on disk"
    if state.lost:
        return "a save was lost"
    lag = min(rank.step for rank in state.ranks) - newest
    if rules.lag is not None and lag > rules.lag:
        return f"all ranks are {lag} steps ahead of the newest common step"
    return None


def is_over(state: State) -> bool:
    pinned = any(any(rank.pins) for rank in state.ranks)
    return state.ended and state.keeper == "idle" and not pinned and not state.persist
