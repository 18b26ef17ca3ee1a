"""Records with any values: a page is still drawn, the browser gets valid JSON, and the panel has its rows."""

import json
import math
import re
from dataclasses import replace

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.config import Config
from holdfast.report.curves import COLUMNS
from holdfast.report.page import render
from holdfast.report.run_record import read_run
from holdfast.train.panel.run_view import RunView
from holdfast.train.panel.screen import panel_rows, short_status

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=1), st.integers(0, 50),
)  # fmt: skip
METRICS = st.dictionaries(st.sampled_from([*COLUMNS, "evaluation_ms", "memory_bytes"]), VALUES, max_size=8)
NAMES = ("started", "failure", "resumed", "persisted", "finished", "snapshot", "refused", "other")
DETAILS = (
    "step",
    "steps_lost",
    "seconds_since_failure",
    "seconds",
    "rank",
    "cause",
    "source",
    "bytes",
    "world",
    "kind",
    "restart",
)
EVENTS = st.builds(
    lambda name, time, rest: {**rest, "event": name, "time": time},
    st.sampled_from(NAMES),
    VALUES,
    st.dictionaries(st.sampled_from(DETAILS), VALUES, max_size=5),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metrics=st.lists(METRICS, max_size=8), events=st.lists(EVENTS, max_size=8))
def test_any_record_can_be_shown(tmp_path, metrics, events):
    for name, records in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        (tmp_path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = read_run(tmp_path)
    html = render([run, run])
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    for row in orjson.loads(data)["runs"][0]["rows"]:
        assert all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in row)
    view = RunView(replace(Config(), train=replace(Config().train, save=str(tmp_path), train_iters=100)))
    view.read()
    assert len(panel_rows(view, 64)) == 7 and short_status(view)
