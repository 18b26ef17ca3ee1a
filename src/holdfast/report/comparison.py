"""The parts of the page that compare runs: a table with one row per run, and the configuration keys that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from holdfast.report.goodput import goodput
from holdfast.report.run_record import RunRecord
from holdfast.report.sections import compact_number, number
from holdfast.system.progress import count_of

OF_THE_FOLDER = {"save", "load"}
"""Keys that differ between any two runs and explain nothing."""
MOST_COLUMNS = 3
"""Keys that differ which the table of runs shows; the table below the charts has all of them."""


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """The names of the run folders; the paths if two names are equal."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def runs_table(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """One row per run, with its main numbers and the first keys that differ, highlighted where unlike the first run."""
    differing = list(differences([_flat(run) for run in runs]).items())
    columns = differing[:MOST_COLUMNS]
    head = "".join(
        f'<th class="{style}">{label}</th>'
        for label, style in {
            "run": "", "state": "", "iteration": "number", "loss": "number", "validation": "number", "best": "number",
            "tokens": "number", "tokens/s": "number", "ms per step": "number", "failures": "number", "goodput": "number",
        }.items()
    )  # fmt: skip
    head += "".join(f"<th>{escape(key)}</th>" for key, _ in columns)
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        validation = [value for _, value in run.series("validation_loss")]
        found = goodput(run)
        cells = [
            f"{run.last('iteration') or 0:,}",
            number(run.last("loss")),
            number(validation[-1] if validation else None),
            number(min(validation, default=None)),
            compact_number(float(run.last("consumed_tokens") or 0)),
            number(run.median("tokens_per_s")),
            number(run.median("step_ms")),
            str(run.incidents),
            f"{found.share:.1%}" if found else "–",
        ]
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        state = f'<td><span class="state {run.state.split()[0]}">{escape(run.state)}</span></td>'
        rows.append(
            f'<tr><td class="run-{index % 8}">{escape(name)}</td>{state}{numbers}{_differing(columns, index)}</tr>'
        )
    if len(differing) > MOST_COLUMNS:
        rest = len(differing) - MOST_COLUMNS
        rows.append(
            f'<tr><td class="more" colspan="20">{count_of(rest, "more key")} differ: see Configurations</td></tr>'
        )
    return f'<div class="card below runs"><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div></div>'


def differences(configs: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """The configuration keys whose values are not equal in all runs, with the value of each run (None: unreadable)."""
    known = [config for config in configs if config is not None]
    keys = [key for key in (known[0] if known else {}) if key not in OF_THE_FOLDER]
    found = {key: [None if config is None else config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def differences_table(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """One row per key that differs; values unlike those of the first run are highlighted."""
    found = differences([_flat(run) for run in runs])
    if not found:
        return '<section><h2>Configurations</h2><p class="empty">all keys are equal, except the folders</p></section>'
    head = "".join(f'<th class="run-{index % 8}">{escape(name)}</th>' for index, name in enumerate(names))
    rows = []
    for key, values in found.items():
        cells = "".join(_differing([(key, values)], index) for index in range(len(values)))
        rows.append(f"<tr><td>{escape(key)}</td>{cells}</tr>")
    body = f"<table><tr><th>key</th>{head}</tr>{''.join(rows)}</table>"
    title = "<h2>Configurations<small>keys that differ; highlighted where unlike the first run</small></h2>"
    return f'<section>{title}<div class="card"><div class="scroll">{body}</div></div></section>'


def _differing(columns: Sequence[tuple[str, list[Any]]], index: int) -> str:
    """The cells of one run; a value unlike that of the first run is highlighted."""
    return "".join(
        f'<td class="{"differs" if values[index] != values[0] else ""}">{escape(_text(values[index]))}</td>'
        for _, values in columns
    )


def _flat(run: RunRecord) -> dict[str, Any] | None:
    """All keys of the configuration. Files of the run folder, such as its copy of the tokenizer, are relative to it."""
    if run.config is None:
        return None
    folder = f"{run.config.train.save}/"
    found = {key: value for section in asdict(run.config).values() for key, value in section.items()}
    return {key: value.removeprefix(folder) if isinstance(value, str) else value for key, value in found.items()}


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(str(part) for part in value)
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
