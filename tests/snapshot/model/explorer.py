"""Breadth-first exploration of every state that a small model can reach.

A model is an initial state (hashable), a function that yields (label, next state), an invariant that returns a message for a bad
state, and optionally a goal. The goal must stay reachable from every state by actions alone: faults, whose labels begin with
"!", do not count towards it, since no rank may rely on a crash to make progress.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

State = Any


@dataclass(frozen=True)
class Explored:
    states: int
    violation: str | None
    """What is wrong and the shortest way to it; None if nothing is."""


def explore(
    initial: Hashable,
    actions: Callable[[State], Iterable[tuple[str, State]]],
    invariant: Callable[[State], str | None],
    goal: Callable[[State], bool] | None = None,
    limit: int = 500_000,
) -> Explored:
    came_from: dict[State, tuple[State, str] | None] = {initial: None}
    before: dict[State, list[State]] = {initial: []}
    waiting = deque([initial])
    while waiting:
        state = waiting.popleft()
        if (wrong := invariant(state)) is not None:
            return Explored(len(came_from), f"{wrong}\n{_way_to(state, came_from)}")
        for label, following in actions(state):
            if following not in came_from:
                came_from[following] = (state, label)
                before[following] = []
                waiting.append(following)
                assert len(came_from) <= limit, f"more than {limit} states: the model is too large"
            if not label.startswith("!"):
                before[following].append(state)
    if goal is not None:
        stuck = _cannot_reach(goal, before)
        if stuck is not None:
            return Explored(len(came_from), f"no continuation without faults ends the run\n{_way_to(stuck, came_from)}")
    return Explored(len(came_from), None)


def _cannot_reach(goal: Callable[[State], bool], before: dict[State, list[State]]) -> State | None:
    """The first state, in the order of exploration, from which no action leads to the goal."""
    reaches = {state for state in before if goal(state)}
    waiting = deque(reaches)
    while waiting:
        for state in before[waiting.popleft()]:
            if state not in reaches:
                reaches.add(state)
                waiting.append(state)
    return next((state for state in before if state not in reaches), None)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> str:
    lines = [f"    {state}"]
    while (step := came_from[state]) is not None:
        state, label = step
        lines.append(label)
    return "\n".join(reversed(lines))
