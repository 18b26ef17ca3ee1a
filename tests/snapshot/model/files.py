"""Claims of a run's memory, and the retention of checkpoints, as models for the explorer.

`claims`: two starts of one run, which may die with a step that is only in memory, and the keeper of an earlier one, which frees
the memory. Each start reads the owner and then claims; the keeper finds all ranks gone, writes what they left and removes the
folder. With the lock a look and what follows from it are one action, after which the keeper compares how often the memory was
claimed. Modelled as in `RankClaim`, `Keeper._has_ended`, `Keeper._free` and `RunMemory.free`.

`checkpoints`: a run that writes steps, loses the content of any checkpoint to damage, and crashes. What may be removed is decided
by the real `retain` on real folders; the content of a checkpoint is one file, present while it is sound.

Not modelled: several nodes, leases, renames that a crash interrupts (test_faults.py).
"""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.checkpoint import retention
from holdfast.checkpoint.folder import checkpoints_in, step_folder_name


class Claims(NamedTuple):
    exists: bool = True
    owner: int | None = None
    starts: tuple[str, ...] = ("begins", "begins")
    """begins, saw none (the defect: it has looked and not claimed yet), owns, died, refused"""
    claims: int = 0
    written: bool = True
    """Whether the newest step of ranks that died is on disk."""
    keeper: str = "watches"
    """watches, saw none, wrote, done"""
    seen: int = 0
    """The claims when the keeper found no rank."""


def claims(state: Claims, locked: bool, compares: str) -> Iterator[tuple[str, Claims]]:
    """`compares`: what the keeper looks at again before it frees: "claims", or as defects "owner" or "nothing"."""

    def start(index: int, phase: str) -> Claims:
        return state._replace(starts=(*state.starts[:index], phase, *state.starts[index + 1 :]))

    for index, phase in enumerate(state.starts):
        claimed = start(index, "owns")._replace(owner=index, exists=True, claims=state.claims + 1)
        if phase == "begins" and state.owner is not None:
            yield f"start {index} is refused", start(index, "refused")
        elif phase == "begins":
            yield f"start {index} finds no owner", claimed if locked else start(index, "saw none")
        elif phase == "saw none":
            yield f"start {index} claims", claimed
        elif phase == "owns" and state.owner == index:
            yield f"!start {index} dies after a step", start(index, "died")._replace(owner=None, written=False)
    if state.keeper == "watches" and state.owner is None:
        yield "the keeper finds no rank", state._replace(keeper="saw none", seen=state.claims)
    elif state.keeper == "saw none":
        yield "the keeper writes what is there", state._replace(keeper="wrote", written=state.owner is None)
    elif state.keeper == "wrote":
        if {"claims": state.claims != state.seen, "owner": state.owner is not None, "nothing": False}[compares]:
            yield "the keeper leaves the memory", state._replace(keeper="watches")
        else:
            yield "the keeper frees the memory", state._replace(keeper="done", exists=False)


def claims_hold(state: Claims) -> str | None:
    if state.starts.count("owns") > 1:
        return "two starts own one memory"
    if "owns" in state.starts and not state.exists:
        return "the memory of a living run was freed"
    if "died" in state.starts and not state.exists and not state.written:
        return "the memory was freed with a step that is not on disk"
    return None


class Checkpoints(NamedTuple):
    """A run that kept every second step until now."""

    sound: frozenset[int] = frozenset({2, 4, 6, 8})
    damaged: frozenset[int] = frozenset()
    step: int = 8
    damages: int = 2


class Disk:
    """A folder of checkpoints in which retention is tried out."""

    def __init__(self, folder: Path, steps: int, keep_last: int, by_number: bool) -> None:
        self._folder, self._steps, self._keep_last, self._by_number = folder, steps, keep_last, by_number
        self._retained = functools.lru_cache(maxsize=None)(self._retain)

    def actions(self, state: Checkpoints) -> Iterator[tuple[str, Checkpoints]]:
        for step in range(state.step + 1, min(state.step + 2, self._steps) + 1):
            sound, damaged = self._retained(state.sound | {step}, state.damaged - {step}, step)
            yield f"step {step} is written", state._replace(sound=sound, damaged=damaged, step=step)
        for step in state.sound if state.damages else ():
            if len(state.sound) > 1:
                damaged = state._replace(sound=state.sound - {step}, damaged=state.damaged | {step})
                yield f"!step {step} is damaged", damaged._replace(damages=state.damages - 1)
        resumed = max(state.sound, default=0)
        if resumed < state.step:
            yield f"!the run resumes from step {resumed}", state._replace(step=resumed)

    def invariant(self, state: Checkpoints) -> str | None:
        if state.step and not state.sound:
            return "no sound checkpoint is left"
        if state.step and state.step not in state.sound | state.damaged:
            return f"step {state.step} was just written or resumed from, and is gone"
        return None

    def _retain(
        self, sound: frozenset[int], damaged: frozenset[int], written: int
    ) -> tuple[frozenset[int], frozenset[int]]:
        if self._by_number:  # the defect
            kept = set(sorted(sound | damaged)[-self._keep_last :])
            return sound & kept, damaged & kept
        shutil.rmtree(self._folder, ignore_errors=True)
        for step in sound | damaged:
            (self._folder / step_folder_name(step)).mkdir(parents=True)
            if step in sound:
                (self._folder / step_folder_name(step) / "content").touch()
        retention.retain(self._folder, self._keep_last, None, protect=[written], written=[written])
        kept = {step for step, _ in checkpoints_in(self._folder)}
        return sound & kept, damaged & kept


def is_sound(folder: Path) -> bool:
    """Stands in for `retention._is_sound`, which compares checksums."""
    return (folder / "content").exists()
