"""The page shows the content of the run folder, and loads nothing else."""

import base64
import contextlib
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.checkpoint.manifest import Manifest, ShardFile, chunk_checksum, write_manifest
from holdfast.cli import run
from holdfast.config import config_to_toml, read_config
from holdfast.report.comparison import differences
from holdfast.report.curves import COLUMNS, thinned
from holdfast.report.page import render
from holdfast.report.rank_times import read_rank_times
from holdfast.report.run_record import read_run
from holdfast.report.sections import compact_number
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.journal import Journal
from holdfast.train.run_folder.events import duration
from tests.disks import small_disk
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


def curves(html):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(found)


def column(run, name):
    return [row[COLUMNS.index(name)] for row in run["rows"]]


def test_the_page_loads_nothing_from_anywhere(folder):
    html = render([read_run(folder)])
    assert Page(html).addresses == [] and "@import" not in html and "url(" not in html
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-")
        and "unsafe" not in policy
        and "connect" not in policy
    )


def test_the_policy_names_the_script_and_the_style_of_the_page_by_their_hashes(folder):
    html = render([read_run(folder)])
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in html
    assert "Permission is hereby granted, free of charge" in html  # the licence of uPlot travels with it


def test_every_logged_point_is_in_the_page(folder):
    found = curves(render([read_run(folder)]))
    (run,) = found["runs"]
    assert column(run, "iteration") == list(range(1, 201))
    assert column(run, "loss") == pytest.approx([value for _, value in read_run(folder).series("loss")], rel=1e-5)
    assert [i for i, v in zip(column(run, "iteration"), column(run, "validation_loss"), strict=True) if v] == list(
        range(25, 201, 25)
    )
    assert [chart["column"] for chart in found["charts"]] == [
        "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "mfu", "snapshot_stall_ms",
    ]  # fmt: skip
    (mark,) = run["marks"]
    assert mark["step"] == 118 and mark["time"] == 23.5 and "resumed from memory" in mark["text"]


def test_times_are_in_seconds_since_the_start_and_old_runs_have_none(folder, tmp_path):
    assert set(column(curves(render([read_run(folder)]))["runs"][0], "time")) == {None}
    Journal(tmp_path / "events.jsonl").write({"time": 1000.0, "event": "started"})
    journal = Journal(tmp_path / "metrics.jsonl")
    for iteration in (1, 2):
        journal.write(record(iteration, time=1000.5 + iteration))
    assert column(curves(render([read_run(tmp_path)]))["runs"][0], "time") == [1.5, 2.5]


def test_several_runs_share_a_page_that_shows_how_their_configurations_differ(folder, tmp_path):
    other = write_run(tmp_path / "second", iterations=300)
    html = render([read_run(folder), read_run(other)])
    assert [run["name"] for run in curves(html)["runs"]] == ["first", "second"]
    text = Page(html).text
    assert (
        "2 runs" in text
        and "train_iters" in text
        and "seq_length" not in text.split("Configurations")[1].split("events,")[0]
    )
    assert re.search(r'<td>train_iters</td><td class="">200</td><td class="differs">300</td>', html)
    # the table of runs has the key too, unlike keys that are equal
    runs = html.split('<div class="card below runs">')[1].split("</table>")[0]
    assert "<th>train_iters</th>" in runs and '<td class="differs">300</td>' in runs and "seq_length" not in runs
    for path in (folder, other):
        config = read_config(path / "config.toml")
        files = replace(config.data, vocab_file=f"{path}/tokenizer/vocab.json")
        text = config_to_toml(replace(config, data=files, train=replace(config.train, save=str(path))))
        (path / "config.toml").write_text(text)
    assert "<td>vocab_file</td>" not in render([read_run(folder), read_run(other)])
    assert differences([{"lr": 1, "seed": 2}, {"lr": 1, "seed": 3}, None]) == {"lr": [1, 1, None], "seed": [2, 3, None]}


def test_runs_of_the_same_name_are_shown_with_their_paths(folder, tmp_path):
    html = render([read_run(folder), read_run(write_run(tmp_path / "first"))])
    assert [run["name"] for run in curves(html)["runs"]] == [str(folder), str(tmp_path / "first")]


def test_generated_texts_of_the_run_are_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "samples").mkdir()
    written = [{"prompt": "<b>once", "completion": " upon", "text": "", "tokens": []}, {"no": "completion"}, 3]
    (folder / "samples" / "step-100.json").write_text(json.dumps(written))
    (folder / "samples" / "torn.json").write_text("[{")
    html = render([read_run(folder)])
    assert "<pre><b>&lt;b&gt;once</b> upon</pre>" in html and "step-100" in Page(html).text


def test_samples_of_evaluations_are_shown_newest_first_and_the_last_of_equal_steps_counts(tmp_path):
    folder = write_run(tmp_path / "run")
    journal = Journal(folder / "samples.jsonl")
    for step, completion in ((50, " first"), (100, " replayed"), (100, " second<")):
        journal.write(
            {"time": 1.0, "step": step, "prompt": "def", "completion": completion, "text": "def" + completion}
        )
    journal.write({"step": "damaged", "prompt": "x", "completion": "y"})
    journal.close()
    html = render([read_run(folder)])
    assert re.findall(r"<figcaption>(.*?)</figcaption><pre><b>def</b>(.*?)</pre>", html) == [
        ("step 100", " second&lt;"),
        ("step 50", " first"),
    ]
    assert "replayed" not in html


def test_the_slowest_rank_comes_first_in_the_table_of_ranks(tmp_path):
    folder = write_run(tmp_path / "run")
    journal = Journal(folder / "rank_times.jsonl")
    journal.write({"iteration": 1, "steps": 1, "compute_ms": [1.0, 2.0, 3.0]})  # before the run went on with two ranks
    for step in (10, 20, 20):
        journal.write({"time": 1.0, "iteration": step, "steps": 10, "compute_ms": [100.0, 150.0 + step]})
    for damaged in ("fast", [1, None], [True, 2]):
        journal.write({"iteration": 30, "compute_ms": damaged})
    journal.close()
    assert read_rank_times(folder / "rank_times.jsonl") == [[100.0, 160.0], [100.0, 170.0]]
    assert read_rank_times(folder / "rank_times.jsonl", tail_bytes=240) == [[100.0, 170.0]]
    html = render([read_run(folder)])
    table = html.split("Step times by rank")[1].split("</table>")[0]
    assert re.findall(r'<td class="number">(.*?)</td>', table) == [
        *("1", "165.0", "1.25 ×", "170.0", "100%"),
        *("0", "100.0", "0.75 ×", "100.0", "0%"),
    ]
    assert "Step times by rank" not in render([read_run(write_run(tmp_path / "without"))])


def test_failures_resumes_and_repeated_steps_are_shown_in_words(folder):
    text = Page(render([read_run(folder)])).text
    for expected in (
        "finished", "rank 1 was killed by SIGKILL at step 120; resumed from memory 3.5 s later, 2 steps repeated",
        "checkpoint step-00000200 written, 5.2 MB, in 0.8 s", "computed again: 2 logged iterations",
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
    page = Page(render([read_run(folder)]))
    assert page.tags.count("script") == 2 and page.text.count(evil) >= 5
    assert len(svgs(render([read_run(folder)]))) == 3
    journal.event("resumed", source="</script>" + evil, step=1)
    page = Page(render([read_run(folder)]))
    assert page.tags.count("script") == 2 and page.text.count("</script>" + evil) >= 2


def test_a_run_that_has_just_started_or_lost_its_numbers_still_has_a_page(tmp_path):
    Journal(tmp_path / "events.jsonl").event("started", world=1)
    assert curves(render([read_run(tmp_path)]))["runs"][0]["rows"] == [] and read_run(tmp_path).state == "under way"
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write(record(1, loss=float("nan"), mfu=None))
    journal.write(record(2, loss=3.0, mfu=None))
    assert read_run(tmp_path).series("loss") == [(2, 3.0)]
    page = render([read_run(tmp_path)])
    assert "the device's peak is unknown" in [chart["hint"] for chart in curves(page)["charts"]] and svgs(page)


def test_a_torn_checkpoint_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    manifest = folder / "checkpoints" / "step-00000100" / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes()[:20])
    (whole, torn) = read_run(folder).checkpoints
    assert "MANIFEST.json" in torn["trouble"] and not whole["trouble"]
    assert read_run(folder).latest == Path(whole["path"]).name
    assert torn["trouble"] in Page(render([read_run(folder)])).text


def test_a_checkpoint_without_a_file_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    shard = ShardFile("shard-00001-of-00002.safetensors", 1, 1000, [chunk_checksum(b"x" * 1000)], [])
    write_manifest(folder / "checkpoints" / "step-00000200", Manifest(200, 2, "plan", {}, [shard]))
    assert "missing or of a wrong size" in Page(render([read_run(folder)])).text


def test_a_page_without_runs_or_a_live_one_with_a_file_is_refused(folder):
    with pytest.raises(UsageError, match="give one or several run folders"):
        run(["report"])
    with pytest.raises(UsageError, match="--watch writes no file"):
        run(["report", str(folder), "--watch", "--output", "x.html"])
    with pytest.raises(UsageError, match="--port is the port of --watch"):
        run(["report", str(folder), "--port", "8765"])
    with pytest.raises(UsageError, match="--port 70000"):
        run(["report", str(folder), "--watch", "--port", "70000"])


def test_the_picture_shows_all_runs(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(["report", str(folder), "--png", "--output", str(tmp_path / "one.png")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG\r\n") and len(
        (tmp_path / "one.png").read_bytes()
    ) > 20_000
    empty = tmp_path / "$x^{"
    empty.mkdir()
    Journal(empty / "events.jsonl").event("started", world=1)
    run(["report", str(empty), str(folder), "--png"])
    assert capsys.readouterr().out.strip() == str(empty / "report.png")


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


def test_long_runs_keep_spikes_validations_and_the_last_row():
    records = [{"iteration": step, "loss": 2.0 + step % 2 / 10} for step in range(100_000)]
    records[50_001]["loss"], records[70_003]["loss"] = 9.0, 0.5
    records[33_333]["validation_loss"] = 2.0
    kept = thinned(records, 20_000)
    assert 10_000 < len(kept) <= 20_010 and kept[-1] is records[-1]
    assert {50_001, 70_003, 33_333} <= {record["iteration"] for record in kept}
    assert [record["iteration"] for record in kept] == sorted(record["iteration"] for record in kept)
    assert thinned(records[:20_000], 20_000) == records[:20_000]
    # while a run grows, the rows sent to a page stay as they are
    later = thinned([*records, {"iteration": 100_000, "loss": 1.0}], 20_000)
    assert later[: len(kept) - 4] == kept[:-4]


def test_a_page_that_cannot_be_written_beside_the_run_is_offered_elsewhere(tmp_path):
    with small_disk(tmp_path / "full", "16m") as disk:
        folder = write_run(disk / "run", iterations=20)
        with contextlib.suppress(OSError):
            (disk / "fill").write_bytes(bytes(16 << 20))
        with pytest.raises(HoldfastError, match=r"choose another folder, with --output FILE$"):
            run(["report", str(folder)])
        run(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").is_file()
