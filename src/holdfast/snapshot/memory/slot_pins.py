"""Pins of slots that are written to disk: which process sets them, and which releases them after a kill.

The invariant: a trainer sets DISK when it requests a save, and the keeper releases it when that step is on disk or its save has
failed for good; the keeper sets KEEPER while it writes, and a new keeper releases the pins of a killed one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.snapshot.memory.arena import DISK, KEEPER, SLOTS
from holdfast.snapshot.memory.ready_slot import ReadySlot
from holdfast.snapshot.memory.run_memory import RunMemory, opened_arenas


@contextmanager
def pinned(slots: Sequence[ReadySlot]) -> Iterator[None]:
    """Keeps the slots from being overwritten while the keeper writes them."""
    for ready in slots:
        ready.arena.pin(ready.index, True, KEEPER)
    try:
        yield
    finally:
        for ready in slots:
            ready.arena.pin(ready.index, False, KEEPER)


def release_killed_keepers(run_memory: RunMemory) -> None:
    with opened_arenas(run_memory.arenas(), run_memory.key) as arenas:
        for arena in arenas:
            for index in range(SLOTS):
                arena.pin(index, False, KEEPER)


def release_save(run_memory: RunMemory, step: int) -> None:
    with opened_arenas(run_memory.arenas(), run_memory.key) as arenas:
        for arena in arenas:
            for index, header in enumerate(arena.headers()):
                if header.step == step:
                    arena.pin(index, False, DISK)
