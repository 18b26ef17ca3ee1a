"""The page shows the content of the run folder, and loads nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.checkpoint.manifest import Manifest, ShardFile, chunk_checksum, write_manifest
from holdfast.cli import run
from holdfast.report.chart import Chart, Curve, compact_number, round_ticks
from holdfast.report.events import duration
from holdfast.report.page import render
from holdfast.report.run_record import downsampled, read_run, smoothed
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from tests.report.runs import record, write_run


class Page(HTMLParser):
    """The page's text, and every address it would load something from."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.addresses, self.tags = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for key, value in attributes if key in ("src", "href", "action", "data", "xlink:href")]

    def handle_data(self, data):
        self.text += data + "\n"


def svgs(html):
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first")


def test_the_page_loads_nothing_from_anywhere(folder):
    html = render(read_run(folder))
    page = Page(html)
    assert page.addresses == [] and "http" not in html and "@import" not in html and "url(" not in html


def test_every_picture_is_well_formed_and_the_loss_is_drawn_point_by_point(folder):
    pictures = svgs(render(read_run(folder)))
    assert [picture.get("aria-label") for picture in pictures] == [
        "Loss", "Loss", "Learning rate", "Gradient norm", "Throughput", "Step time", "Model FLOPs utilisation", "Snapshot stall",
        "events over time", "events over time",
    ]  # fmt: skip
    lines = {line.get("class"): line.get("points").split() for line in pictures[0].iter("polyline")}
    assert len(lines["line raw"]) == 200 and len(lines["line second"]) == 8
    xs = [float(point.split(",")[0]) for point in lines["line raw"]]
    ys = [float(point.split(",")[1]) for point in lines["line raw"]]
    assert xs == sorted(xs) and ys[0] < ys[-1]  # the loss falls, and SVG counts downwards
    # a value lies where the axis says: the tick labels are at the heights of their numbers
    ticks = {float(t.text): float(t.get("y")) - 3.5 for t in pictures[0].iter("text") if t.get("text-anchor") == "end"}
    (low, high), per_unit = (
        (min(ticks), max(ticks)),
        (ticks[max(ticks)] - ticks[min(ticks)]) / (max(ticks) - min(ticks)),
    )
    loss = read_run(folder).series("loss")
    assert low <= loss[-1][1] <= high
    assert ys[-1] == pytest.approx(ticks[low] + (loss[-1][1] - low) * per_unit, abs=0.2)


def test_every_axis_has_a_label_with_its_unit(folder):
    labels = [
        [text.text for text in picture.iter("text") if text.get("class") == "axis-label"]
        for picture in svgs(render(read_run(folder)))
    ]
    assert labels[1:] == [
        ["loss (nats)", "iteration"], ["learning rate", "iteration"], ["L2 norm", "iteration"],
        ["tokens/s, all ranks", "iteration"], ["ms per step", "iteration"], ["% of the device's peak", "iteration"],
        ["ms per step", "iteration"], ["time since the first event"], ["time since the first event"],
    ]  # fmt: skip


def test_a_phone_gets_narrow_drawings(folder):
    """At 390 pixels a drawing of 980 has labels of 4 pixels: wide drawings are hidden there, and no other is wider than 480."""
    html = render(read_run(folder))
    for picture in svgs(html):
        assert picture.get("class") == "on-wide" or float(picture.get("viewBox").split()[2]) <= 480
    assert "svg.on-wide { display: none; } svg.on-narrow { display: block; }" in html


def test_failures_resumes_and_repeated_steps_are_shown_in_words(folder):
    text = Page(render(read_run(folder))).text
    for expected in (
        "finished", "rank 1 was killed by SIGKILL at step 120; resumed from memory 3.5 s later, 2 steps repeated",
        "checkpoint step-00000200 written, 5.2 MB, in 0.8 s", "2 logged iterations were computed again",
        "failures survived", "step-00000100", "latest", "tensor 1 × pipeline 1", "the complete configuration",
    ):  # fmt: skip
        assert expected in text, expected
    assert read_run(folder).incidents == 1  # the keeper and the parent both reported it


def test_a_step_that_was_computed_again_shows_the_values_that_counted(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for iteration, loss in [(1, 9.0), (2, 8.0), (3, 7.0), (2, 5.0), (3, 4.0)]:
        journal.write(record(iteration, loss=loss))
    found = read_run(tmp_path)
    assert found.series("loss") == [(1, 9.0), (2, 5.0), (3, 4.0)] and found.repeated == 2


def test_what_a_run_folder_contains_cannot_become_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    folder = write_run(tmp_path / "a<b>&run")
    journal = Journal(folder / "events.jsonl")
    journal.event("failure", rank=evil, cause=evil, kind=evil, **{evil: evil})
    journal.event(evil, path=evil)
    page = Page(render(read_run(folder)))
    assert page.tags.count("script") == 1 and page.text.count(evil) >= 5
    assert len(svgs(render(read_run(folder)))) == 10


def test_a_run_that_has_just_started_or_lost_its_numbers_still_has_a_page(tmp_path):
    Journal(tmp_path / "events.jsonl").event("started", world=1)
    assert "nothing logged yet" in render(read_run(tmp_path)) and read_run(tmp_path).state == "under way"
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write(record(1, loss=float("nan"), mfu=None))
    journal.write(record(2, loss=3.0, mfu=None))
    assert read_run(tmp_path).series("loss") == [(2, 3.0)]
    page = render(read_run(tmp_path))
    assert "the device's peak is unknown" in Page(page).text and svgs(page)


def test_a_torn_checkpoint_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    manifest = folder / "checkpoints" / "step-00000100" / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes()[:20])
    (whole, torn) = read_run(folder).checkpoints
    assert "MANIFEST.json" in torn["trouble"] and not whole["trouble"]
    assert read_run(folder).latest == Path(whole["path"]).name
    assert torn["trouble"] in Page(render(read_run(folder))).text


def test_a_checkpoint_without_a_file_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    shard = ShardFile("shard-00001-of-00002.safetensors", 1, 1000, [chunk_checksum(b"x" * 1000)], [])
    write_manifest(folder / "checkpoints" / "step-00000200", Manifest(200, 2, "plan", {}, [shard]))
    assert "missing or of a wrong size" in Page(render(read_run(folder))).text


def test_the_command_writes_the_page_beside_the_run_and_prints_where(folder, tmp_path, capsys):
    run(["report", str(folder)])
    assert capsys.readouterr().out.strip() == str(folder / "report.html") and (folder / "report.html").stat().st_size
    run(["report", str(folder), "--output", str(tmp_path / "page.html"), "--json"])
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(HoldfastError, match="no run folder .*nowhere"):
        run(["report", str(tmp_path / "nowhere")])
    with pytest.raises(HoldfastError, match="is not a run folder"):
        run(["report", str(tmp_path)])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (2.1, 7.9, [2, 4, 6, 8]),
        (0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (-3, 4, [-4, -2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, expected):
    assert round_ticks(low, high, 4) == pytest.approx(expected)


def test_a_constant_or_a_single_value_can_be_drawn():
    for points in ([(1, 5.0)], [(1, 0.0), (2, 0.0)]):
        (picture,) = svgs(Chart("constant", "", [Curve("a", points, "main")]).svg())
        assert "nan" not in ElementTree.tostring(picture).decode()


def test_numbers_and_durations_are_short():
    assert [compact_number(value) for value in (0, 0.0003, 0.000015, 2.5, 1234, 58540, 1.638e6, 2e12)] == [
        "0", "0.0003", "1.5e-5", "2.5", "1234", "58.54k", "1.638M", "2T",
    ]  # fmt: skip
    assert [duration(value) for value in (0.42, 61, 3600, 7380, 200_000)] == [
        "0.42 s",
        "1 min 01 s",
        "1 h",
        "2 h 03 min",
        "2 d 07 h",
    ]


def test_long_curves_are_thinned_to_means_and_smoothing_keeps_a_constant():
    series = [(float(x), float(x % 2)) for x in range(5000)]
    thin = downsampled(series, 500)
    assert len(thin) == 500 and all(value == 0.5 for _, value in thin)
    assert smoothed([(0, 3.0), (1, 3.0), (2, 3.0)], 10) == [(0, 3.0), (1, 3.0), (2, 3.0)]
