"""The page about one or several runs: one HTML file that loads nothing else.

The invariants: text from a run folder is escaped, and a content security policy names the page's own script and style by hash,
so that the browser runs no other script even if text were not escaped. Python writes the text, tables and the timeline; page.js
draws the curves with uPlot from the JSON in the page, and in live mode replaces all of it with what the server sends.
"""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from holdfast.report import sections
from holdfast.report.comparison import differences_table, run_names, runs_table
from holdfast.report.curves import COLUMNS, charts_of, curves_of
from holdfast.report.description import moment
from holdfast.report.rank_times import rank_table
from holdfast.report.run_record import RunRecord


def render(runs: Sequence[RunRecord], live: bool = False) -> str:
    """The whole page as text. A live page listens to the server that it came from."""
    content = page_content(runs)
    style, script = _style(), _script()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{content_policy(live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(content["title"])} · holdfast</title>
<style>{style}</style>
</head>
<body{' data-live="events"' if live else ""}><main>
<div id="top">{content["parts"]["top"]}</div>
{CONTROLS}
<div class="charts" id="charts"></div>
<div id="bottom">{content["parts"]["bottom"]}</div>
</main>
<script type="application/json" id="data">{_json_for_html(content)}</script>
<script>{script}</script>
</body></html>
"""


def content_policy(live: bool) -> str:
    """Scripts and styles of this page only; nothing is loaded, and only a live page may connect, to its own server."""
    connect = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; {connect}script-src '{_hash(_script())}'; style-src '{_hash(_style())}'; "
        "base-uri 'none'; form-action 'none'"
    )


def page_content(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything on the page that depends on the runs: HTML of the parts above and below the charts, and the curves."""
    names = run_names(runs)
    return {
        "title": ", ".join(names),
        "parts": {"top": _top(runs, names), "bottom": _bottom(runs, names)},
        "columns": COLUMNS,
        "charts": charts_of(runs),
        "runs": [curves_of(run, name, len(runs)) for run, name in zip(runs, names, strict=True)],
    }


def _top(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    problems = "".join(sections.problem_list(run.problems) for run in runs)
    if len(runs) == 1:
        (run,) = runs
        state = f'<span class="state {run.state.split()[0]}">{escape(run.state)}</span>'
        head = f"<header><h1>{escape(names[0])}{state}</h1><p>{escape(sections.subtitle(run))}</p></header>"
        return f'{head}{problems}{sections.tiles(run)}<div class="card below">{sections.goodput_bar(run)}</div>'
    head = f"<header><h1>{len(runs)} runs</h1></header>"
    bars = "".join(sections.goodput_bar(run, name) for run, name in zip(runs, names, strict=True))
    return f'{head}{problems}{runs_table(runs, names)}<div class="card below">{bars}</div>'


def _bottom(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    parts = [differences_table(runs, names)] if len(runs) > 1 else []
    for run, name in zip(runs, names, strict=True):
        about = "".join(
            (
                sections.events(run),
                rank_table(run.rank_times),
                sections.checkpoints(run),
                sections.samples(run.samples),
                sections.configuration(run.config),
            )
        )
        folded = f"<details><summary>{escape(name)}: events, checkpoints, configuration</summary>{about}</details>"
        parts.append(folded if len(runs) > 1 else about)
    where = ", ".join(str(run.path) for run in runs)
    drawn = f"Drawn by holdfast report on {moment(datetime.now(UTC).timestamp())} UTC from {where}"
    return f"{''.join(parts)}<footer>{escape(drawn)}</footer>"


CONTROLS = """<form id="controls" class="controls">
<label>x axis <select name="x"><option value="iteration">steps</option><option value="consumed_tokens">tokens</option>
<option value="time">wall time</option></select></label>
<label><input type="checkbox" name="logx"> log x</label>
<label><input type="checkbox" name="logy"> log y</label>
<label>smoothing <input type="range" name="smoothing" min="0" max="100" value="0"> <output name="span"></output></label>
<button type="button" name="reset" disabled>reset zoom</button>
<span class="hint mouse">drag to zoom, double click to reset; click a name to hide its curve</span>
<span class="hint touch">pinch to zoom, drag to move, double tap to reset; tap a name to hide its curve</span>
<span id="connection" class="state" hidden></span><noscript>The curves need JavaScript.</noscript></form>"""


def _json_for_html(content: dict[str, Any]) -> str:
    """The curves as JSON that cannot end its script element."""
    curves = {key: value for key, value in content.items() if key != "parts"}
    text = orjson.dumps(curves).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _style() -> str:
    return _asset("uplot/uPlot.min.css") + _asset("page.css")


def _script() -> str:
    return f"/* uPlot 1.6.32\n{_asset('uplot/LICENSE')}\n*/\n{_asset('uplot/uPlot.iife.min.js')}\n{_asset('page.js')}"


def _asset(name: str) -> str:
    return files("holdfast.report").joinpath(*name.split("/")).read_text(encoding="utf-8")
