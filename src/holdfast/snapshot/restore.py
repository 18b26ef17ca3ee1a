"""Where to continue: the highest step for which every byte verifies, from memory, a peer's memory or disk.

All ranks see the same list of candidates and reach the same decision. What cannot be used is skipped and logged, and the next
copy of it, or the next older step, is tried. The invariants: what `restore` loads was verified after it was chosen, is of one
step on all ranks, and is the newest of its kind; a run that has any state starts at step 0 only if the user removes that state.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.checkpoint.json_state import decode
from holdfast.checkpoint.loading import load
from holdfast.checkpoint.state import State
from holdfast.snapshot.keeper.client import start_keeper
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.run_memory import opened_arenas
from holdfast.snapshot.memory.small_state import Extra, set_random_state
from holdfast.snapshot.nan_guard import NEAR, NanGuard
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.snapshot.restore_memory import Candidate, LoadedState, RejectedState, list_candidates, load_candidate
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import tail_lines
from holdfast.system.progress import count_of, log

TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RestoreContext:
    """What `restore` needs of this rank and its run."""

    state: State
    extra: Extra
    folder: Path
    rank_group: RankGroup
    nan_guard: NanGuard
    reached: int
    """the step that this rank had reached before it was started again; 0 if it never ran on this node"""
    committed: int
    """the newest step that all ranks are known to have held; 0 if there was none"""
    event: Callable[..., None]
    """writes one line to events.jsonl, on rank 0"""


@dataclass(frozen=True)
class Resumed:
    step: int
    in_place: bool = False
    """memory already holds this step, in the arenas that the run goes on with"""
    sequence: int = 0
    """the highest sequence number in memory"""
    arena: Arena | None = None
    """this rank's memory, mapped already, if the state was loaded from it"""


def restore(context: RestoreContext) -> Resumed:
    """Loads the newest usable state into the tensors of this rank; collective. Step 0 if the run has no state at all."""
    begin = time.perf_counter()
    rank_group = context.rank_group
    # A step that one rank has not done was not done; a rank that never ran on this node does not count.
    reached = min(filter(None, rank_group.gather(context.reached)), default=0) or _report_lost_memory(context)
    suspect: int | None = rank_group.gather(context.nan_guard.suspected() if rank_group.rank == 0 else None)[0]
    if rank_group.first_on_node:
        # Other nodes may pull from it. A keeper that was killed a moment ago may still have looked alive.
        start_keeper(rank_group.run_memory)
    held = list_candidates(rank_group, context.committed, context.event)
    on_disk = _list_checkpoints(context)
    for step, source in _by_preference(held.candidates, on_disk, suspect):
        try:
            loaded = _load(context, source)
        except RejectedState as error:
            log(f"{error.source} cannot be used; trying the next one: {error.reason}")
            context.event("snapshot", step=step, outcome="rejected", reason=error.reason[:1000])
            continue
        if suspect is not None:
            _handle_suspect(context, suspect, step)
        in_place = isinstance(source, Candidate)
        _empty_other_slots(context, step if in_place else None)
        _report_resumed(context, loaded.source, step, max(0, reached - step), time.perf_counter() - begin)
        return Resumed(step, in_place, held.sequence, loaded.arena)
    if on_disk:
        raise HoldfastError(
            f"no checkpoint in {context.folder} can be used (see the lines above); remove them to start over at step 0"
        )
    if held.candidates or held.unusable:
        raise HoldfastError(
            f"memory holds state of this run that cannot be used ({'; '.join(held.unusable) or 'see the lines above'}), and "
            f"no checkpoint is on disk. To discard it and start over at step 0, remove {rank_group.run_memory.path}"
        )
    if rank_group.rank == 0:
        context.nan_guard.resumed_from(None)
    _empty_other_slots(context, None)
    return Resumed(0, sequence=held.sequence)


def rewind(state: State, extra: Extra, rank_group: RankGroup, event: Callable[..., None]) -> int | None:
    """Loads the newest step in memory into a state that is in use; returns the step, or None if memory holds none. Collective.

    Memory stays as it is: the steps that follow must have higher numbers than those before. So do the random generators."""
    rank_group.gather(None)  # the copies of all ranks are whole
    held = list_candidates(rank_group, 0, event)
    for candidate in sorted(held.candidates, key=lambda candidate: candidate.step, reverse=True):
        try:
            loaded = load_candidate(candidate, state, rank_group)
        except RejectedState as error:
            log(f"{error.source} cannot be used; trying the next one: {error.reason}")
            continue
        if loaded.arena is not None:
            loaded.arena.close()
        extra.set(loaded.extra)
        return candidate.step
    return None


def _list_checkpoints(context: RestoreContext) -> list[tuple[int, str]]:
    """(step, path). Rank 0 lists them: a shared file system may show a new folder to one node before another."""
    first = context.rank_group.rank == 0
    found = [(step, str(path)) for step, path in checkpoints_in(context.folder)] if first else None
    return [(step, path) for step, path in context.rank_group.gather(found)[0]]


def _report_lost_memory(context: RestoreContext) -> int:
    """No node has memory of the run: the last step in its log, or 0. Steps after the newest checkpoint are lost."""
    reached: int = 0
    if context.rank_group.rank == 0:
        reached = _last_logged(context.folder / "metrics.jsonl")
        newest = max((step for step, _ in checkpoints_in(context.folder)), default=0)
        if reached > newest:
            on_disk = f"the newest checkpoint is of step {newest}" if newest else "no checkpoint is on disk"
            reason = f"the run reached step {reached}; memory holds nothing of it any more, and {on_disk}"
            log(f"warning: {reason}")
            context.event("snapshot", step=reached, outcome="lost", reason=reason)
    found: int = context.rank_group.gather(reached)[0]
    return found


def _last_logged(metrics: Path) -> int:
    """The iteration of the last record of metrics.jsonl; 0 without one."""
    for line in reversed(tail_lines(metrics, TAIL_BYTES)):
        with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return int(orjson.loads(line)["iteration"])
    return 0


def _by_preference(
    candidates: Sequence[Candidate], on_disk: Sequence[tuple[int, str]], suspect: int | None
) -> list[tuple[int, Candidate | str]]:
    """Newest first, memory before disk; a state suspected of leading to NaN only if there is no other.

    A step of which memory lacks the own state of a rank, which was killed before it held the step, comes after the newest of
    which it lacks nothing: all ranks would go on, but with other random numbers.
    """
    sources: list[tuple[int, Candidate | str]] = [(candidate.step, candidate) for candidate in candidates]
    sources += on_disk
    whole = max((candidate.step for candidate in candidates if candidate.has_all_ranks()), default=None)

    def preference(entry: tuple[int, Candidate | str]) -> tuple[bool, int, bool, bool]:
        step, source = entry
        held = isinstance(source, Candidate)
        complete = not isinstance(source, Candidate) or source.has_all_ranks()
        age = step if complete or whole is None else min(step, whole)
        return suspect is None or step < suspect, age, complete, held

    return sorted(sources, key=preference, reverse=True)


def _load(context: RestoreContext, source: Candidate | str) -> LoadedState:
    if isinstance(source, Candidate):
        loaded = load_candidate(source, context.state, context.rank_group)
    else:
        loaded = _load_checkpoint(source, context.state)
    context.extra.set(loaded.extra)
    if loaded.random is not None:
        set_random_state(decode(loaded.random))
    return loaded


def _load_checkpoint(path: str, state: State) -> LoadedState:
    try:
        shared = load(path, state)
    except (HoldfastError, OSError) as error:
        raise RejectedState(f"checkpoint {path}", str(error)) from error
    return LoadedState("disk", state.per_rank.get("extra", shared.get("extra", {})), state.per_rank.get("random"))


def _handle_suspect(context: RestoreContext, suspect: int, step: int) -> None:
    """Two resumed runs met NaN soon after step `suspect`; now the run continues from `step`."""
    if context.rank_group.rank != 0:
        return
    warning = f"WARNING: two runs that resumed near step {suspect} met NaN soon after"
    if step >= suspect:
        log(
            f"{warning}, and no older state can be used; continuing from step {step}. Check the data and the learning rate"
        )
        return
    paths = [str(path) for path in context.nan_guard.quarantine()]
    log(f"{warning}: {', '.join(paths) or 'snapshots in memory'} set aside, going back to step {step}")
    reason = f"two resumed runs met NaN within {NEAR} steps"
    context.event("snapshot", step=suspect, outcome="set aside", reason=reason, paths=paths)


def _empty_other_slots(context: RestoreContext, keep: int | None) -> None:
    """Empties the memory of steps that the run does not continue from: it must not pass for newer than what follows."""
    run_memory = context.rank_group.run_memory
    context.rank_group.gather(None)
    if context.rank_group.first_on_node:
        with opened_arenas(run_memory.arenas() + run_memory.peer_arenas(), run_memory.key) as arenas:
            for arena in arenas:
                arena.empty_except(keep)
    context.rank_group.gather(None)


def _report_resumed(context: RestoreContext, source: str, step: int, lost: int, seconds: float) -> None:
    context.event("resumed", source=source, step=step, steps_lost=lost, seconds=round(seconds, 4))
    redo = f"; {count_of(lost, 'step')} to redo" if lost else ""
    log(f"resumed from {source} at step {step} in {seconds:.2f} s{redo}")
    if context.rank_group.rank == 0:
        context.nan_guard.resumed_from(step)
