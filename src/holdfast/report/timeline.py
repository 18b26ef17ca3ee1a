"""The events of a run over time as inline SVG, in lanes. The page's style sheet sets the colours.

It is drawn twice, for a wide page and for a phone, because the labels of a scaled wide drawing are too small to read.
"""

import math
from collections.abc import Sequence
from html import escape

from holdfast.report.run_record import RunRecord
from holdfast.train.run_folder.events import describe_event, duration

WIDE, NARROW = 980, 480
LEFT, ROW = 96, 28

# Event → lane of the timeline and style. Other events get a lane of their own.
LANES = {
    "started": ("run", "main"),
    "finished": ("run", "main"),
    "failure": ("failures", "bad"),
    "refused": ("failures", "bad"),
    "resumed": ("resumes", "good"),
    "snapshot": ("snapshots", "warn"),
    "persisted": ("on disk", "third"),
}
Lane = tuple[str, str, list[tuple[float, str]]]
"""(label, style, [(seconds since the first event, text)])"""


def timeline(run: RunRecord) -> str:
    """Both drawings; the style sheet shows one of them."""
    found: dict[str, tuple[str, list[tuple[float, str]]]] = {}
    for lane, style in LANES.values():
        found.setdefault(lane, (style, []))
    start, end = float(run.events[0]["time"]), float(run.events[-1]["time"])
    for event in run.events:
        lane, style = LANES.get(event["event"], (event["event"], "main"))
        entry = describe_event(event)
        since = entry.time - start
        found.setdefault(lane, (style, []))[1].append((since, f"{entry.text}, {duration(since)} after the start"))
    lanes = [(lane, style, events) for lane, (style, events) in found.items() if events]
    return _draw(lanes, end - start, WIDE, "on-wide") + _draw(lanes, end - start, NARROW, "on-narrow")


def _draw(lanes: Sequence[Lane], seconds: float, width: int, style: str) -> str:
    seconds = max(seconds, 1.0)
    height = ROW * len(lanes) + 52

    def across(moment: float) -> float:
        return LEFT + 10 + (width - 30 - LEFT) * moment / seconds

    parts = []
    for number, (label, colour, events) in enumerate(lanes):
        y = ROW * number + 16
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - 10}" y1="{y}" y2="{y}"/>')
        parts.append(_text("lane", LEFT - 12, y + 4, label, "end"))
        parts += [
            f'<circle class="event {colour}" cx="{across(moment):.1f}" cy="{y}" r="6"><title>{escape(text)}</title></circle>'
            for moment, text in events
        ]
    for tick in duration_ticks(seconds, width // 120):
        parts.append(_text("tick", across(tick), height - 30, duration(tick)))
    parts.append(_text("axis-label", (LEFT + width) / 2, height - 6, "time since the first event"))
    label = "events over time"
    return f'<svg class="{style}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _text(style: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def duration_ticks(seconds: float, most: int = 8) -> list[float]:
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
    step = next((step for step in steps if seconds / step <= most), 86400 * math.ceil(seconds / 86400 / most))
    return [float(number * step) for number in range(int(seconds // step) + 1)]
