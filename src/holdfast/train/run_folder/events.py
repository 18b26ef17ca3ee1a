"""Describes the events of a run. The records of one failure, and of the restart that follows it, make one sentence.

The invariant: events.jsonl may hold anything; a record that lacks a key, or has a value of another type, is still described.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from holdfast.snapshot.report import size_text
from holdfast.system.progress import count_of

Event = dict[str, Any]
SAVE_REASONS = {
    "save": "",
    "persist": " because `holdfast persist` asked for it",
    "died": " because a rank failed",
    "hung": " because a rank hung",
    "stopped": " before the run stopped",
    "error.txt": " because the file error.txt appeared",
    "another node asks": " together with another node",
}
COMMON_KEYS = {"time", "event", "step"}


@dataclass(frozen=True)
class DescribedEvent:
    """A row of the table of events. `style` is one of "", good, bad, warn."""

    time: float
    kind: str
    style: str
    step: int | None
    text: str


def describe_events(events: Sequence[Event]) -> list[DescribedEvent]:
    """One sentence per event or failure, in order of time."""
    entries = []
    index = 0
    while index < len(events):
        if events[index]["event"] == "failure":
            incident, after, rest = _split_incident(events[index:])
            entries.append(_describe_incident(incident, after))
            entries += [describe_event(event) for event in rest]
            index += len(incident) + len(after) + len(rest)
        else:
            entries.append(describe_event(events[index]))
            index += 1
    return sorted(entries, key=lambda entry: entry.time)


def last_failure(events: Sequence[Event]) -> tuple[Event, str] | None:
    """The record of the cause of the last failure, and its description; None if nothing failed."""
    starts = [i for i, event in enumerate(events) if event["event"] == "failure"]
    if not starts:
        return None
    first = starts[-1]
    while first and events[first - 1]["event"] not in ("started", "resumed", "finished"):
        first -= 1
    incident, after, _ = _split_incident(events[first:])
    return _cause(incident), _describe_incident(incident, after).text


def _split_incident(events: Sequence[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """The records from a failure to the end of the restart: (failures, start and resume, others)."""
    failures: list[Event] = []
    after: list[Event] = []
    others: list[Event] = []
    for event in events:
        name = event["event"]
        if name == "finished" or (name == "failure" and after) or (name == "started" and after):
            break
        if name == "failure":
            failures.append(event)
        elif name in ("started", "resumed"):
            after.append(event)
        else:
            others.append(event)
        if name == "resumed":
            break
    return failures, after, others


def _cause(failures: Sequence[Event]) -> Event:
    """The failure that came first: the exit that the supervisor saw, else a rank without an error message (a killed process
    leaves none, and the other ranks only lose their connection), else the first record."""
    exits = [event for event in failures if event.get("kind") == "exit"]
    silent = [event for event in failures if not event.get("cause")]
    return [*exits, *silent, *failures][0]


def _describe_incident(failures: Sequence[Event], after: Sequence[Event]) -> DescribedEvent:
    step, text = _failure(failures)
    first = float(failures[0]["time"])
    resumed = next((event for event in after if event["event"] == "resumed"), None)
    if resumed is not None:
        source = resumed.get("source", "an unknown source")
        text += f"; resumed from {source} {_after_failure(resumed, first)}, {repeated_steps(resumed)}"
    elif after:
        text += f"; all ranks started again {_later(after[0], first)}"
    else:
        text += "; the run did not continue"
    return DescribedEvent(first, "failed", "bad", step, text)


def _failure(failures: Sequence[Event]) -> tuple[int | None, str]:
    """The step of a failure, if a record has it, and the description."""
    cause = _cause(failures)
    rank, reason = cause.get("rank", "?"), one_line(str(cause.get("cause") or "")).rstrip(".")
    same = [event for event in failures if event.get("rank") == rank]
    step = next((found for event in same if (found := as_int(event.get("step"))) is not None), None)
    if reason.startswith("killed by "):
        text = f"rank {rank} was {reason}"
    elif cause.get("kind") == "hung":
        text = f"rank {rank} hung" + (f" ({reason})" if reason else "")
    else:
        text = f"rank {rank} failed: {reason}" if reason else f"rank {rank} died without an error message"
    # the step stands before a long error text, and after the short name of a signal
    where = _at_step(step)
    return step, text.replace(" failed:", f" failed{where}:", 1) if " failed:" in text else text + where


def _at_step(step: int | None) -> str:
    return "" if step is None else f" at step {step:,}"


def describe_event(event: Event) -> DescribedEvent:
    """The description of one record, without those around it."""
    kind, style, text = _DESCRIPTIONS.get(str(event["event"]), _other)(event)
    return DescribedEvent(float(event["time"]), kind, style, as_int(event.get("step")), text)


# Each returns (kind, style, text) of a record.


def _failed(event: Event) -> tuple[str, str, str]:
    return "failed", "bad", _failure([event])[1]


def _started(event: Event) -> tuple[str, str, str]:
    world, nodes, restart = (as_int(event.get(key)) for key in ("world", "nodes", "restart"))
    text = count_of(world, "rank") if world else "the ranks"
    text += f" on {nodes} nodes" if nodes and nodes > 1 else ""
    return "started", "", f"{text} started" + (f" (restart {restart})" if restart else "")


def _resumed(event: Event) -> tuple[str, str, str]:
    where = _at_step(as_int(event.get("step")))
    source = event.get("source", "an unknown source")
    since = event.get("seconds_since_failure")
    after = f", {duration(round(float(since), 2))} after the failure" if isinstance(since, int | float) else ""
    return "resumed", "good", f"resumed from {source}{where}{after}, {repeated_steps(event)}{_took(event)}"


def _persisted(event: Event) -> tuple[str, str, str]:
    reason = str(event.get("reason", ""))
    size = event.get("bytes")
    held = f", {size_text(size)}" if isinstance(size, int | float) else ""
    why = SAVE_REASONS.get(reason, f" because of {reason}" if reason else "")
    folder = PurePath(str(event.get("path", ""))).name
    return "saved", "", f"checkpoint {folder} written{why}{held}{_took(event)}"


def _finished(event: Event) -> tuple[str, str, str]:
    skipped = as_int(event.get("skipped"))
    tail = _at_step(as_int(event.get("step"))) + (f"; {count_of(skipped, 'snapshot')} skipped" if skipped else "")
    if event.get("stopped"):
        return "stopped", "warn", f"stopped on request ({event.get('reason') or 'unknown'}){tail}"
    return "finished", "good", f"finished{tail}"


def _refused(event: Event) -> tuple[str, str, str]:
    tries = as_int(event.get("tries"))
    reason = one_line(str(event.get("reason", "no reason recorded")))
    return "refused", "bad", reason + (f" (try {tries})" if tries else "")


def _snapshot(event: Event) -> tuple[str, str, str]:
    step, outcome, reason = as_int(event.get("step")), str(event.get("outcome", "taken")), event.get("reason")
    text = "snapshot" + (f" of step {step:,}" if step is not None else "")
    if outcome == "peer":
        return "snapshot", "", f"{text} copied to node {event.get('node', 'unknown')}{_took(event)}"
    return "snapshot", "warn", f"{text} {outcome}" + (f": {one_line(str(reason))}" if reason else "")


def _other(event: Event) -> tuple[str, str, str]:
    facts = [f"{key} {value}" for key, value in event.items() if key not in COMMON_KEYS and value not in (None, "", [])]
    return str(event["event"]), "", one_line(", ".join(facts))


_DESCRIPTIONS = {
    "failure": _failed,
    "started": _started,
    "resumed": _resumed,
    "persisted": _persisted,
    "finished": _finished,
    "refused": _refused,
    "snapshot": _snapshot,
}


def repeated_steps(event: Event) -> str:
    """How many steps a resume computes again."""
    lost = as_int(event.get("steps_lost")) or 0
    return f"{count_of(lost, 'step')} repeated" if lost else "no step repeated"


def duration(seconds: float) -> str:
    """3.2 s, 4 min 05 s, 2 h 03 min, 5 d 01 h."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s".replace(".0 s", " s")
    minutes, rest = int(seconds // 60), int(seconds % 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest:02d} s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes:02d} min" if minutes else "")
    return f"{hours // 24} d {hours % 24:02d} h"


def as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def one_line(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _later(event: Event, first: float) -> str:
    return f"{duration(round(max(0.0, float(event['time']) - first), 2))} later"


def _after_failure(resumed: Event, first: float) -> str:
    """`seconds_since_failure` as the ranks measured it; in records without it, the time between the two records."""
    since = resumed.get("seconds_since_failure")
    return f"{duration(round(float(since), 2))} later" if isinstance(since, int | float) else _later(resumed, first)


def _took(event: Event) -> str:
    seconds = event.get("seconds")
    return f", in {duration(round(float(seconds), 2))}" if isinstance(seconds, int | float) else ""
