"""Builds a dataset, from the input to PREFIX_KEY_document.bin and .idx.

The input is cut into units; workers encode each into a part; parts are appended in the order of the input; at the end everything
gets its final name. Every step leaves a state on disk from which the next call resumes.
"""

import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from holdfast.data.indexed import dtype_for_vocabulary, pair_paths, publish_pairs
from holdfast.data.preprocess.cross_check import CrossCheck
from holdfast.data.preprocess.history import History, cutting_rules, keep_unchanged
from holdfast.data.preprocess.options import PreprocessOptions
from holdfast.data.preprocess.provenance import (
    Summary,
    completed_summary,
    describe,
    provenance_path,
    refuse_to_replace,
    versions,
)
from holdfast.data.preprocess.report import ProgressReport
from holdfast.data.preprocess.sentences import language_code
from holdfast.data.preprocess.units import Partition, identity, lines_before, plan, unit_bytes
from holdfast.data.preprocess.worker import EncodedPart, UnitResult, WorkerSetup
from holdfast.data.preprocess.workers import WorkerPool
from holdfast.data.preprocess.workspace import Workspace
from holdfast.data.sources import InputFile, Unit, bad_line_error
from holdfast.data.sources.recognition import wrong_format
from holdfast.system.atomic_files import explain_os_error, make_folder, publish_bytes
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of, log
from holdfast.tokenizers import Recipe
from holdfast.tokenizers.tokenizer import EngineChoice

# No real corpus gives fewer bytes than this per byte of plain text: with less free space the run is certain to fail.
SMALLEST_OUTPUT_SHARE = 0.2
SHOWN_FILES = 5


@dataclass(frozen=True)
class DatasetBuild:
    """What is built: the options with the files, the tokenizer and the engine that they come to."""

    options: PreprocessOptions
    files: tuple[InputFile, ...]
    recipe: Recipe
    engine: EngineChoice
    prefix: str
    partition: Partition | None = None

    @property
    def language(self) -> str | None:
        return language_code(self.options.lang) if self.options.split_sentences else None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(dtype_for_vocabulary(self.recipe.vocab_size))

    @property
    def outputs(self) -> list[str]:
        level = "sentence" if self.options.split_sentences else "document"
        return [f"{self.prefix}_{key}_{level}" for key in self.options.json_keys]

    @property
    def record(self) -> Path:
        """The provenance file."""
        return provenance_path(self.prefix, [file.path for file in self.files])

    def worker_setup(self) -> WorkerSetup:
        options = self.options
        eod = self.recipe.eod if options.append_eod else None
        return WorkerSetup(
            self.recipe, self.engine, options.json_keys, eod, str(self.dtype), self.language, options.keep_newlines
        )

    def settings(self) -> dict[str, Any]:
        """What decides the bytes of the result."""
        options = self.options
        return {
            "inputs": [identity(file) for file in self.files],
            "sources": [file.source for file in self.files],
            "tokenizer": {"type": self.recipe.tokenizer_type, "digest": self.recipe.digest},
            "json_keys": list(options.json_keys),
            "append_eod": options.append_eod,
            "language": self.language,
            "keep_newlines": options.keep_newlines,
            "on_bad_line": options.on_bad_line,
            "unit_bytes": unit_bytes(self.files),
            "share": asdict(self.partition) if self.partition else None,
        }

    def work(self) -> dict[str, Any]:
        """The settings that an unfinished run must share with this one to be continued; bad lines may be treated otherwise."""
        settings = self.settings()
        del settings["on_bad_line"], settings["sources"]
        return {**settings, "cuts": cutting_rules(self.files)}

    def keep_unchanged(self, history: History, before: Mapping[str, Any], now: Mapping[str, Any]) -> History:
        """What stays valid of an unfinished run whose input has changed since."""
        if self.partition and history.last_file >= 0:
            log("the input has changed, and with it the bounds of the partitions: this one starts over")
            return History()
        return keep_unchanged(history, before, now, self.files, now["unit_bytes"])


def build(task: DatasetBuild, pool: WorkerPool) -> Summary:
    settings, record = task.settings(), task.record
    # Standard input may bring other data under the same settings.
    complete = None if "-" in task.options.input else completed_summary(record, settings)
    if complete is not None and not task.options.overwrite:
        return complete
    _check_free_space(task)
    workspace = Workspace(
        Path(task.prefix + ".preprocessing"),
        task.work(),
        len(task.options.json_keys),
        task.dtype.itemsize,
        overwrite=task.options.overwrite,
        keep_unchanged=task.keep_unchanged,
    )
    finished = False
    try:
        if task.options.on_bad_line == "fail":
            _refuse_skipped_lines(task, workspace)
        if not task.options.overwrite and not workspace.state.complete:
            refuse_to_replace([path for output in task.outputs for path in pair_paths(output)])
        memory, engine = _tokenize(task, workspace, pool)
        refuse_changed_input(task, settings)
        summary = _publish(task, settings, workspace, record, memory, engine)
        finished = True
        return summary
    except BaseException as error:
        pool.close()  # no worker may write to the workspace while it is removed
        if isinstance(error, OSError):
            raise explain_os_error(error, workspace.parts) from error
        raise
    finally:
        workspace.close(remove=finished or workspace.is_empty)


def _refuse_skipped_lines(task: DatasetBuild, workspace: Workspace) -> None:
    """An earlier call skipped bad lines and this one must not."""
    if workspace.state.bad:
        with (workspace.folder / "bad.jsonl").open("rb") as file:
            raise _bad_line_error(task, orjson.loads(file.readline()))


def refuse_changed_input(task: DatasetBuild, settings: Mapping[str, Any]) -> None:
    """Raises if an input is not the file any more that it was when the settings were read: it may have been read as neither."""
    for file, before in zip(task.files, settings["inputs"], strict=True):
        # One that was removed was read to its end: each unit opens the file again.
        if file.path == "-" or not Path(file.path).exists():
            continue
        if identity(file) != before or file.size != before["size"]:
            raise HoldfastError(
                f"{file.path} has changed while it was read; run the command again when nothing writes to it any more: "
                "finished work on what has not changed is kept"
            )


def _bad_line_error(task: DatasetBuild, line: dict[str, Any]) -> HoldfastError:
    source = next(file.source for file in task.files if file.path == line["file"])
    return bad_line_error(source, **line)


def _check_free_space(task: DatasetBuild) -> None:
    folder = Path(task.prefix).absolute().parent
    make_folder(folder, Path(task.prefix))
    partitions = task.partition.count if task.partition else 1
    text = sum(file.size * (4 if file.compression else 1) for file in task.files) / partitions
    likely, least = text * task.dtype.itemsize * 0.3, text * SMALLEST_OUTPUT_SHARE
    free = shutil.disk_usage(folder).free
    if free < least:
        raise HoldfastError(
            f"the disk of {folder} has {_size(free)} free, and this input needs about {_size(likely)}: "
            "free some space or choose another folder"
        )
    if free < likely:
        log(f"the disk of {folder} has {_size(free)} free; this input needs about {_size(likely)}")


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _tokenize(task: DatasetBuild, workspace: Workspace, pool: WorkerPool) -> tuple[int, str]:
    """Brings the workspace to the end of the input; returns peak memory in bytes and the name of the engine."""
    if workspace.state.complete:
        return 0, ""

    def missing_units(report: ProgressReport) -> Iterator[tuple[int, Unit]]:
        for number, unit in enumerate(plan(task.files, task.partition, workspace.unit_bytes)):
            if workspace.is_missing(number):
                yield number, unit
            else:
                report.skipped(unit)

    check = CrossCheck(task.recipe, task.engine)
    with ProgressReport(task, workspace) as report:
        # The workers load their tokenizer; this process loads what it needs later.
        check.load()
        versions()
        report.appended(_append_ready(task, workspace))
        for unit, result in pool.results(missing_units(report), workspace.parts):
            report.engine(pool.engine, pool.workers)
            workspace.add(_accept(result, check))
            report.finished(unit)
            report.appended(_append_ready(task, workspace))
        if not workspace.state.documents and not task.partition:
            raise _no_document_error(task, workspace.state.bad)
    return pool.memory + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, pool.engine


def _no_document_error(task: DatasetBuild, bad: int) -> HoldfastError:
    names = [file.path for file in task.files[:SHOWN_FILES]]
    more = f" and {len(task.files) - SHOWN_FILES:,} more" if len(task.files) > SHOWN_FILES else ""
    wrong = wrong_format(names[0]) if task.files[0].source == "jsonl" else ""
    empty = "the input is empty" if not sum(file.size for file in task.files) else "is the input empty?"
    why = wrong or (f"{count_of(bad, 'bad line')}, and nothing else" if bad else empty)
    return HoldfastError(f"{', '.join(names)}{more}: no document found; {why}")


def _accept(result: UnitResult, check: CrossCheck) -> EncodedPart:
    if result.part is None:
        if result.disk_full:
            raise HoldfastError(
                f"no room left on the disk ({result.error}): free some space and run the command again; finished work is kept"
            )
        raise HoldfastError(result.error)
    check.compare(result.samples)
    return result.part


def _append_ready(task: DatasetBuild, workspace: Workspace) -> list[EncodedPart]:
    """Appends the parts that are next in order. A bad line is reported here, once the lines before it are counted."""
    appended = []
    while (part := workspace.next_part()) is not None:
        lines = _bad_lines(task, workspace, part) if part.bad else []
        if lines and task.options.on_bad_line == "fail":
            raise _bad_line_error(task, lines[0])
        workspace.append(part, b"".join(orjson.dumps(line) + b"\n" for line in lines))
        appended.append(part)
    return appended


def _bad_lines(task: DatasetBuild, workspace: Workspace, part: EncodedPart) -> list[dict[str, Any]]:
    state = workspace.state
    line, offset = (state.line, state.offset) if part.file == state.file else (0, 0)
    if task.partition:
        first = next(unit for unit in plan(task.files, task.partition) if unit.file == part.file)
        before = lines_before(task.files, first)
        line, offset = line + before[0], offset + before[1]
    path = task.files[part.file].path
    return [
        {"file": path, "line": line + number + 1, "offset": offset + at, "reason": reason}
        for number, at, reason in part.bad
    ]


def _publish(
    task: DatasetBuild, settings: dict[str, Any], workspace: Workspace, record: Path, memory: int, engine: str
) -> Summary:
    """Gives everything its final name: the indices after the tokens, and the provenance file last."""
    state = workspace.state
    pairs = workspace.finish(task.dtype)
    tokens = sum(key.bytes for key in state.keys) // task.dtype.itemsize
    summary = Summary(
        outputs=tuple(task.outputs),
        documents=state.documents,
        sequences=sum(key.sequences for key in state.keys),
        tokens=tokens,
        input_bytes=state.size,
        bytes_per_token=state.size / tokens if tokens else 0.0,
        bad_lines=state.bad,
        seconds=state.seconds,
        peak_memory_bytes=memory,
        engine=engine,
        provenance=str(record),
    )
    digests = {file.path: workspace.digests.get(file.number, "") for file in task.files}
    sizes = [(key.bytes, key.sequences, key.documents) for key in state.keys]
    bad = Path(task.prefix + ".bad.jsonl")
    # The provenance of an older dataset goes before its files do, and the new one comes when all files have their names.
    record.unlink(missing_ok=True)
    if state.bad:
        publish_bytes(bad, (workspace.folder / "bad.jsonl").read_bytes())
    else:
        bad.unlink(missing_ok=True)
    publish_pairs([(*pair, output) for pair, output in zip(pairs, task.outputs, strict=True)])
    publish_bytes(record, describe(task, summary, settings, sizes, digests))
    return summary
