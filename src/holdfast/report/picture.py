"""`holdfast report --png`: the main curves as a picture for a README or a chat, drawn by matplotlib (an optional extra).

A browser would draw the page itself, but clusters have none, and a rasteriser with fonts of our own would be longer than this.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.report.comparison import run_names
from holdfast.report.curves import CHARTS
from holdfast.report.run_record import RunRecord, Series
from holdfast.system.atomic_files import publish_bytes
from holdfast.system.errors import HoldfastError

COLOURS = ("#2a72c8", "#d9622b", "#17805a", "#8a4fc9", "#b07400", "#c8327f", "#14808f", "#6b6b64")
SMALL = ("tokens_per_s", "step_ms", "grad_norm")


def draw_picture(runs: Sequence[RunRecord], path: Path) -> None:
    """Writes 1,200 × 700 pixels: the loss above, throughput, step time and gradient norm below."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HoldfastError("--png needs matplotlib; install it with: pip install 'holdfast[png]'") from error
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(SMALL), height_ratios=(1.7, 1))
    charts = {chart.column: chart for chart in CHARTS}
    names = [name.replace("$", r"\$") for name in run_names(runs)]  # a dollar starts a formula in matplotlib
    for column, place in (("loss", grid[0, :]), *((name, grid[1, index]) for index, name in enumerate(SMALL))):
        axes = figure.add_subplot(place)
        axes.set_title(charts[column].title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("step", fontsize=9)
        axes.set_ylabel(charts[column].axis, fontsize=9)
        axes.grid(color="#e4e4de", linewidth=0.8)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            _draw(axes, run, name, column, COLOURS[number % len(COLOURS)])
        if charts[column].from_zero:
            axes.set_ylim(bottom=0)
        if column == "loss" and axes.lines:
            axes.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    publish_bytes(path, buffer.getvalue())


def _draw(axes: Any, run: RunRecord, name: str, column: str, colour: str) -> None:
    series = run.series(column)
    span = max(8, len(series) // 100)
    smooth = len(series) > 60
    if smooth:
        axes.plot(*_coordinates(series), color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(*_coordinates(smoothed(series, span) if smooth else series), color=colour, linewidth=1.8, label=name)
    validation = run.series("validation_loss") if column == "loss" else []
    if validation:
        axes.plot(
            *_coordinates(validation), "o--", color=colour, markersize=4, linewidth=1, label=f"{name}, validation"
        )


def _coordinates(series: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in series], [y for _, y in series]


def smoothed(series: Series, span: int) -> Series:
    """Exponential mean over about `span` points, corrected for the bias of its start."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = []
    for x, y in series:
        total, weight = total * keep + y, weight * keep + 1
        found.append((x, total / weight))
    return found
