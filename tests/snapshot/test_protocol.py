"""The protocol, simulated: any number of ranks, any copy times, any crash instant leave one common step, at most one
step back."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.snapshot.memory.slot import NOTHING, READY, WRITING, SlotHeader
from holdfast.snapshot.memory.slot_allocator import slots_to_use

STEPS = 12


@dataclass
class Rank:
    """A rank's slots over time: (from when on, slot, header)."""

    history: list[tuple[float, int, SlotHeader]] = field(default_factory=list)
    done: float = 0.0
    begun: float = 0.0

    def slots(self, when: float) -> list[SlotHeader]:
        found = [NOTHING, NOTHING, NOTHING]
        for time, slot, header in self.history:
            if time <= when:
                found[slot] = header
        return found


def header(state: int, step: int) -> SlotHeader:
    return SlotHeader(state, step, step, 0, 0, 0, 0, 0.0)


def simulate(
    ranks: int, computing: list[float], copying: list[float], pinned_at: int, waits: bool
) -> tuple[list[Rank], list[float]]:
    """Trains: compute, reduce the gradients, commit, step, wait until all ranks are READY, take."""
    rank_group = [Rank() for _ in range(ranks)]
    draw_compute, draw_copy = iter(computing), iter(copying)
    committed: int | None = None
    finished = []
    for step in range(1, STEPS + 1):
        reduced = max(rank.begun + next(draw_compute) for rank in rank_group)
        stepped = [max(reduced, rank.done) + 0.01 for rank in rank_group]
        finished.append(max(stepped))
        all_ready = max(rank.done for rank in rank_group)
        if waits and step > 1:
            committed = step - 1
        for rank, time in zip(rank_group, stepped, strict=True):
            begin = max(time, all_ready) if waits else time
            pins = [index == 0 and step >= pinned_at for index in range(3)]
            slots = rank.slots(begin)
            usable = slots_to_use(slots, pins, committed if waits else None)
            rank.begun = begin
            if usable:
                rank.done = begin + next(draw_copy)
                rank.history.append((begin, usable[0], header(WRITING, step)))
                rank.history.append((rank.done, usable[0], header(READY, step)))
    return rank_group, finished


worlds = st.integers(1, 6)


def draws(ranks: int, low: float, high: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(low, high), min_size=ranks * STEPS, max_size=ranks * STEPS)


@given(st.data(), worlds, st.booleans())
@settings(max_examples=120, deadline=None)
def test_a_crash_at_any_instant_leaves_a_common_step(data, ranks, pinned):
    computing = data.draw(draws(ranks, 0.5, 1.5))
    copying = data.draw(draws(ranks, 0.01, 2.4))
    rank_group, finished = simulate(ranks, computing, copying, STEPS // 2 if pinned else STEPS + 1, waits=True)
    first_common = max(
        time for rank in rank_group for time, _, entry in rank.history if entry.state == READY and entry.step == 1
    )
    crash = data.draw(st.floats(first_common, max(rank.done for rank in rank_group)))
    held = [{entry.step for entry in rank.slots(crash) if entry.state == READY} for rank in rank_group]
    common = set.intersection(*held)
    assert common, f"no common step at {crash}: {held}"
    done = sum(time <= crash for time in finished)
    assert done - max(common) <= 1, f"{done} steps were done, {max(common)} is held"


def test_without_waiting_for_the_others_two_slots_are_not_enough():
    """The simulation can fail: this is the defect that waiting for the other ranks prevents."""
    import random

    chance = random.Random(3)
    lost = 0
    for _ in range(300):
        rank_group, _ = simulate(
            4,
            [chance.uniform(0.5, 1.5) for _ in range(4 * STEPS)],
            [chance.uniform(0.03, 2.4) for _ in range(4 * STEPS)],
            99,
            False,
        )
        crash = chance.uniform(4, max(rank.done for rank in rank_group))
        held = [{entry.step for entry in rank.slots(crash) if entry.state == READY} for rank in rank_group]
        lost += not set.intersection(*held)
    assert lost > 10
