"""The events of a run in words. Several records of one failure, and the restart that follows it, make one sentence.

The invariant: events.jsonl may hold anything; a record that lacks a key, or has a value of another type, still gets words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from holdfast.snapshot.report import size_text

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
KNOWN = {"time", "event", "step"}


@dataclass(frozen=True)
class Entry:
    """A line of the list of events. `kind` is its heading, `style` one of "", good, bad, warn."""

    time: float
    kind: str
    style: str
    step: int | None
    text: str


def describe_events(events: Sequence[Event]) -> list[Entry]:
    """The events, in order of time, as sentences."""
    entries = []
    index = 0
    while index < len(events):
        if events[index]["event"] == "failure":
            incident, after, rest = _take_incident(events[index:])
            entries.append(_failed(incident, after))
            entries += [describe_event(event) for event in rest]
            index += len(incident) + len(after) + len(rest)
        else:
            entries.append(describe_event(events[index]))
            index += 1
    return sorted(entries, key=lambda entry: entry.time)


def last_failure(events: Sequence[Event]) -> tuple[Event, str] | None:
    """The record that names the cause of the last failure, and the sentence about it; None if nothing failed."""
    starts = [i for i, event in enumerate(events) if event["event"] == "failure"]
    if not starts:
        return None
    first = starts[-1]
    while first and events[first - 1]["event"] not in ("started", "resumed", "finished"):
        first -= 1
    incident, after, _ = _take_incident(events[first:])
    return _cause(incident), _failed(incident, after).text


def _take_incident(events: Sequence[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """Splits the records from a failure to the end of the restart: the failures, the start and resume, and the others."""
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
    """The failure that came first: as its parent process saw it, else a rank without an error of its own (a killed process
    leaves none, and the others only lose their connection), else the first record."""
    for wanted in (lambda event: event.get("kind") == "exit", lambda event: not event.get("cause")):
        for event in failures:
            if wanted(event):
                return event
    return failures[0]


def _failed(failures: Sequence[Event], after: Sequence[Event]) -> Entry:
    step, text = _failure(failures)
    first = float(failures[0]["time"])
    resumed = next((event for event in after if event["event"] == "resumed"), None)
    if resumed is not None:
        text += (
            f"; resumed from {resumed.get('source', 'an unknown source')} {_later(resumed, first)}, {repeated(resumed)}"
        )
    elif after:
        text += f"; all ranks started again {_later(after[0], first)}"
    else:
        text += "; the run did not continue"
    return Entry(first, "failed", "bad", step, text)


def _failure(failures: Sequence[Event]) -> tuple[int | None, str]:
    """The step of a failure, if a record has it, and what happened."""
    cause = _cause(failures)
    rank, reason = cause.get("rank", "?"), one_line(str(cause.get("cause") or "")).rstrip(".")
    same = [event for event in failures if event.get("rank") == rank]
    step = next((found for event in same if (found := whole(event.get("step"))) is not None), None)
    if reason.startswith("killed by "):
        text = f"rank {rank} was {reason}"
    elif cause.get("kind") == "hung":
        text = f"rank {rank} hung" + (f" ({reason})" if reason else "")
    else:
        text = f"rank {rank} failed: {reason}" if reason else f"rank {rank} died without an error message"
    place = f" at step {step:,}" if step is not None else ""
    # the step goes before a long error text, and after the short name of a signal
    text = text.replace(" failed:", f" failed{place}:", 1) if " failed:" in text else text + place
    return step, text


def describe_event(event: Event) -> Entry:
    """One record on its own."""
    name = str(event["event"])
    step = whole(event.get("step"))
    kind, style, text = _WORDS.get(name, _other)(event)
    return Entry(float(event["time"]), kind, style, step, text)


def _died(event: Event) -> tuple[str, str, str]:
    return "failed", "bad", _failure([event])[1]


def _started(event: Event) -> tuple[str, str, str]:
    world, nodes, restart = (whole(event.get(key)) for key in ("world", "nodes", "restart"))
    text = f"{world} rank{'' if world == 1 else 's'}" if world else "the ranks"
    text += f" on {nodes} nodes" if nodes and nodes > 1 else ""
    return "started", "", f"{text} started" + (f" (restart {restart})" if restart else "")


def _resumed(event: Event) -> tuple[str, str, str]:
    source, step = event.get("source", "an unknown source"), whole(event.get("step"))
    place = f" at step {step:,}" if step is not None else ""
    return "resumed", "good", f"resumed from {source}{place}, {repeated(event)}{_took(event)}"


def _persisted(event: Event) -> tuple[str, str, str]:
    reason = str(event.get("reason", ""))
    size = event.get("bytes")
    held = f", {size_text(size)}" if isinstance(size, int | float) else ""
    why = SAVE_REASONS.get(reason, f" because of {reason}" if reason else "")
    folder = PurePath(str(event.get("path", ""))).name
    return "saved", "", f"checkpoint {folder} written{why}{held}{_took(event)}"


def _finished(event: Event) -> tuple[str, str, str]:
    step, skipped = whole(event.get("step")), whole(event.get("skipped"))
    place = f" at step {step:,}" if step is not None else ""
    missed = f"; {skipped} snapshot{'' if skipped == 1 else 's'} skipped" if skipped else ""
    if event.get("stopped"):
        return "stopped", "warn", f"stopped on request ({event.get('reason') or 'unknown'}){place}{missed}"
    return "finished", "good", f"finished{place}{missed}"


def _refused(event: Event) -> tuple[str, str, str]:
    tries = whole(event.get("tries"))
    return (
        "refused",
        "bad",
        one_line(str(event.get("reason", "no reason recorded"))) + (f" (try {tries})" if tries else ""),
    )


def _snapshot(event: Event) -> tuple[str, str, str]:
    step, outcome, reason = whole(event.get("step")), str(event.get("outcome", "taken")), event.get("reason")
    text = "snapshot" + (f" of step {step:,}" if step is not None else "")
    if outcome == "peer":
        return "snapshot", "", f"{text} copied to node {event.get('node', 'unknown')}{_took(event)}"
    return "snapshot", "warn", f"{text} {outcome}" + (f": {one_line(str(reason))}" if reason else "")


def _other(event: Event) -> tuple[str, str, str]:
    facts = [f"{key} {value}" for key, value in event.items() if key not in KNOWN and value not in (None, "", [])]
    return str(event["event"]), "", one_line(", ".join(facts))


_WORDS = {
    "failure": _died,
    "started": _started,
    "resumed": _resumed,
    "persisted": _persisted,
    "finished": _finished,
    "refused": _refused,
    "snapshot": _snapshot,
}


def repeated(event: Event) -> str:
    """How many steps a resume computes again."""
    lost = whole(event.get("steps_lost")) or 0
    return "no step repeated" if not lost else f"{lost:,} step{'' if lost == 1 else 's'} repeated"


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


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def one_line(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _later(event: Event, first: float) -> str:
    return f"{duration(round(max(0.0, float(event['time']) - first), 2))} later"


def _took(event: Event) -> str:
    seconds = event.get("seconds")
    return f", in {duration(round(float(seconds), 2))}" if isinstance(seconds, int | float) else ""
