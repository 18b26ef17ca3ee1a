"""Charts as inline SVG: curves over iterations with ticks at round numbers, and events over time. The page sets the colours.

A chart is drawn for a width in pixels. On a phone the page shows a second, narrow drawing of a wide chart, because the labels of
the scaled wide one are too small to read.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from holdfast.report.events import duration
from holdfast.report.run_record import Series

LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
NARROW = 480


@dataclass(frozen=True)
class Curve:
    """A series to draw. `style` is a class of the page's style sheet."""

    name: str
    points: Series
    style: str
    dots: bool = False


@dataclass(frozen=True)
class Marker:
    """An event at an iteration: a vertical line with a text that shows on hovering."""

    x: float
    style: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over iterations."""

    title: str
    unit: str
    lines: Sequence[Curve]
    marks: Sequence[Marker] = ()
    height: int = 200
    width: int = 480
    from_zero: bool = False
    axis: str = ""
    """Label of the vertical axis, with its unit."""
    hint: str = ""
    style: str = ""

    def svg(self) -> str:
        points = [point for line in self.lines for point in line.points]
        if not points:
            return '<p class="empty">nothing logged yet</p>'
        xs, ys = [x for x, _ in points], [y for _, y in points]
        across = AxisScale(min(xs), max(xs), LEFT, self.width - RIGHT)
        low, high = (0.0 if self.from_zero else min(ys)), max(ys)
        if low == high:
            low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
        ticks = round_ticks(low, high, 5 if self.height >= 240 else 4)
        up = AxisScale(min(low, ticks[0]), max(high, ticks[-1]), self.height - BOTTOM, TOP)
        parts = [self._grid(across, up, ticks)]
        for mark in self.marks:
            if across.low <= mark.x <= across.high:
                x = across(mark.x)
                parts.append(
                    f'<g class="mark {mark.style}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"/>'
                    f'<circle cx="{x:.1f}" cy="{TOP}" r="4"/><title>{escape(mark.text)}</title></g>'
                )
        parts += [draw_curve(curve, across, up) for curve in self.lines]
        parts.append('<g class="cursor" visibility="hidden"><line y1="0" y2="0"/></g>')
        return (
            f'<svg class="{self.style}" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}"'
            f' data-chart="{escape(json.dumps(self._data(across)))}">{"".join(parts)}</svg>'
        )

    def _grid(self, across: "AxisScale", up: "AxisScale", ticks: list[float]) -> str:
        right, base = self.width - RIGHT, self.height - BOTTOM
        parts = []
        for tick in ticks:
            parts.append(svg_rule("grid", LEFT, right, up(tick)))
            parts.append(svg_text("tick", LEFT - 7, up(tick) + 3.5, compact_number(tick), "end"))
        parts.append(svg_text("axis-label", 4, 14, self.axis or self.unit, "start"))
        parts.append(svg_text("axis-label", (LEFT + right) / 2, self.height - 6, "iteration"))
        parts.append(svg_rule("axis", LEFT, right, base))
        for tick in round_ticks(across.low, across.high, 6 if self.width > 600 else 4, whole=True):
            if across.low <= tick <= across.high:
                parts.append(svg_text("tick", across(tick), base + 19, f"{tick:,.0f}"))
        return "".join(parts)

    def _data(self, across: "AxisScale") -> dict[str, Any]:
        """The data from which the page shows the values under the pointer."""
        lines = [
            {"name": line.name, "style": line.style, "points": [[x, float(f"{y:.6g}")] for x, y in line.points]}
            for line in self.lines
        ]
        plot = [across.start, across.end, TOP, self.height - BOTTOM]
        return {"unit": self.unit, "x": [across.low, across.high], "plot": plot, "lines": lines}


@dataclass(frozen=True)
class AxisScale:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start + share * (self.end - self.start)


def svg_text(style: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg_rule(style: str, left: float, right: float, y: float) -> str:
    return f'<line class="{style}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'


def draw_curve(curve: Curve, across: AxisScale, up: AxisScale) -> str:
    places = [(across(x), up(y)) for x, y in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline class="line {curve.style}" points="{path}"/>' if len(places) > 1 else ""
    if curve.dots or len(places) == 1:
        drawn += "".join(f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places)
    return drawn


def round_ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) that span low to high."""
    rough = (high - low) / max(about, 1) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(round(step)))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def compact_number(value: float) -> str:
    """A number in a few characters: 12.3k, 1.2M, 3e-04."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.3g}".replace("e-0", "e-")


def timeline(
    lanes: Sequence[tuple[str, str, Sequence[tuple[float, str]]]],
    start: float,
    end: float,
    width: int = 980,
    style: str = "",
) -> str:
    """Draws events over time, in lanes of (label, style, [(seconds since the epoch, text)])."""
    left, row = 96, 28
    height = row * len(lanes) + 52
    across = AxisScale(start, max(end, start + 1), left + 10, width - 20)
    parts = []
    for number, (label, colour, events) in enumerate(lanes):
        y = row * number + 16
        parts += [svg_rule("grid", left, width - 10, y), svg_text("lane", left - 12, y + 4, label, "end")]
        parts += [
            f'<circle class="event {colour}" cx="{across(moment):.1f}" cy="{y}" r="6"><title>{escape(text)}</title></circle>'
            for moment, text in events
        ]
    for tick in duration_ticks(across.high - start, width // 120):
        parts.append(svg_text("tick", across(start + tick), height - 30, duration(tick)))
    parts.append(svg_text("axis-label", (left + width) / 2, height - 6, "time since the first event"))
    return f'<svg class="{style}" viewBox="0 0 {width} {height}" role="img" aria-label="events over time">{"".join(parts)}</svg>'


def duration_ticks(seconds: float, most: int = 8) -> list[float]:
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
    step = next((step for step in steps if seconds / step <= most), 86400 * math.ceil(seconds / 86400 / most))
    return [float(number * step) for number in range(int(seconds // step) + 1)]
