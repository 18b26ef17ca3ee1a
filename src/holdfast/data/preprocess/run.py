"""Making a dataset: the story of a run, from the input to PREFIX_KEY_document.bin and .idx.

The input is cut into units; workers make a part of each; parts are appended in the order of the input; at the end everything
gets its final name. Every step leaves a state on disk from which the next call goes on.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from holdfast.data.indexed import dtype_for_vocabulary, pair_paths, publish_pairs
from holdfast.data.preprocess.changed_input import cuts, keep_unchanged
from holdfast.data.preprocess.history import History
from holdfast.data.preprocess.provenance import (
    Summary,
    describe,
    finished_before,
    provenance_path,
    refuse_to_replace,
    versions,
)
from holdfast.data.preprocess.report import Report
from holdfast.data.preprocess.units import Share, identity, lines_before, plan, unit_bytes
from holdfast.data.preprocess.worker import Answer, Job, Part, give_back_memory
from holdfast.data.preprocess.workers import Crew
from holdfast.data.preprocess.workspace import Workspace
from holdfast.data.sources import InputFile, Unit, bad_line_error
from holdfast.data.sources.recognition import wrong_format
from holdfast.system.atomic_files import explain_os_error, make_folder, publish_bytes
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of, log
from holdfast.tokenizers import Recipe, Tokenizer

# Fewer bytes than this per byte of plain text never came out of a real corpus; less room than that is certain to fail.
SMALLEST_OUTPUT_SHARE = 0.2
SHOWN_FILES = 5


@dataclass(frozen=True)
class Request:
    """The arguments of a run, checked."""

    files: tuple[InputFile, ...]
    prefix: str
    recipe: Recipe
    keys: tuple[str, ...]
    append_eod: bool
    language: str | None
    keep_newlines: bool
    workers: int
    on_bad_line: str
    overwrite: bool
    engine: str
    log_interval: int | None
    share: Share | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(dtype_for_vocabulary(self.recipe.vocab_size))

    @property
    def outputs(self) -> list[str]:
        level = "sentence" if self.language else "document"
        return [f"{self.prefix}_{key}_{level}" for key in self.keys]

    def settings(self) -> dict[str, Any]:
        """What decides the bytes of the result."""
        return {
            "inputs": [identity(file) for file in self.files],
            "sources": [file.source for file in self.files],
            "tokenizer": {"type": self.recipe.tokenizer_type, "digest": self.recipe.digest},
            "json_keys": list(self.keys),
            "append_eod": self.append_eod,
            "language": self.language,
            "keep_newlines": self.keep_newlines,
            "on_bad_line": self.on_bad_line,
            "unit_bytes": unit_bytes(self.files),
            "share": asdict(self.share) if self.share else None,
        }

    def work(self) -> dict[str, Any]:
        """What an unfinished run must have in common with this one to be continued; bad lines may be treated otherwise."""
        settings = self.settings()
        del settings["on_bad_line"], settings["sources"]
        return {**settings, "cuts": cuts(self.files)}

    def keep_unchanged(self, history: History, before: Mapping[str, Any], now: Mapping[str, Any]) -> History:
        """What stays valid of an unfinished run whose input has changed since."""
        if self.share and history.last_file >= 0:
            log("the input has changed, and with it where partitions begin and end: this one starts over")
            return History()
        return keep_unchanged(history, before, now, self.files, now["unit_bytes"])


def run(request: Request, crew: Crew) -> Summary:
    settings = request.settings()
    inputs = [file.path for file in request.files]
    record = provenance_path(request.prefix, inputs)
    # Nothing is known of what came from standard input before.
    complete = finished_before(record, settings) if "-" not in inputs else None
    if complete is not None and not request.overwrite:
        return complete
    finals = [path for output in request.outputs for path in pair_paths(output)]
    _check_room(request)
    workspace = Workspace(
        Path(request.prefix + ".preprocessing"),
        request.work(),
        len(request.keys),
        request.dtype.itemsize,
        overwrite=request.overwrite,
        keep_unchanged=request.keep_unchanged,
    )
    finished = False
    try:
        if request.on_bad_line == "fail":
            _refuse_skipped_lines(request, workspace)
        if not request.overwrite and not workspace.state.complete:
            refuse_to_replace(finals)
        memory, engine = _tokenize(request, workspace, crew)
        summary = _publish(request, settings, workspace, record, memory, engine)
        finished = True
        return summary
    except OSError as error:
        raise explain_os_error(error, workspace.folder / "parts") from error
    finally:
        workspace.close(remove=finished or workspace.is_empty)


def _refuse_skipped_lines(request: Request, workspace: Workspace) -> None:
    """An earlier call skipped bad lines and this one must not."""
    if workspace.state.bad:
        with (workspace.folder / "bad.jsonl").open("rb") as file:
            raise _bad_line_error(request, orjson.loads(file.readline()))


def _bad_line_error(request: Request, line: dict[str, Any]) -> HoldfastError:
    source = next(file.source for file in request.files if file.path == line["file"])
    return bad_line_error(source, **line)


def _check_room(request: Request) -> None:
    folder = Path(request.prefix).absolute().parent
    make_folder(folder, Path(request.prefix))
    share = request.share.count if request.share else 1
    text = sum(file.size * (4 if file.compression else 1) for file in request.files) / share
    likely, least = text * request.dtype.itemsize * 0.3, text * SMALLEST_OUTPUT_SHARE
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


def _tokenize(request: Request, workspace: Workspace, crew: Crew) -> tuple[int, str]:
    """Brings the workspace to the end of the input; gives peak memory and the name of the engine."""
    if workspace.state.complete:
        return 0, ""
    job = Job(
        request.keys,
        request.recipe.eod if request.append_eod else None,
        str(request.dtype),
        str(workspace.parts),
        request.language,
        request.keep_newlines,
    )

    def wanted(report: Report) -> Iterator[tuple[int, Unit]]:
        for number, unit in enumerate(plan(request.files, request.share, workspace.unit_bytes)):
            if workspace.wants(number):
                yield number, unit
            else:
                report.skipped(unit)

    check = CrossCheck(request)
    with Report(request, workspace) as report:
        crew.begin(job, wanted(report))
        # While the crew gets ready, this process has time for what it will need later.
        check.load()
        versions()
        report.appended(_append_ready(request, workspace))
        for unit, answer in crew.answers():
            report.engine(crew.engine)
            workspace.add(_accept(answer, check))
            report.finished(unit)
            report.appended(_append_ready(request, workspace))
        report.appended(_append_ready(request, workspace))
        if not workspace.state.documents and not request.share:
            raise _nothing_found(request, workspace.state.bad)
        return sum(crew.memory) + _own_memory(), crew.engine


def _nothing_found(request: Request, bad: int) -> HoldfastError:
    names = [file.path for file in request.files[:SHOWN_FILES]]
    more = f" and {len(request.files) - SHOWN_FILES:,} more" if len(request.files) > SHOWN_FILES else ""
    wrong = wrong_format(names[0]) if request.files[0].source == "jsonl" else ""
    empty = "the input is empty" if not sum(file.size for file in request.files) else "is the input empty?"
    why = wrong or (f"{count_of(bad, 'bad line')}, and nothing else" if bad else empty)
    return HoldfastError(f"{', '.join(names)}{more}: no document found; {why}")


def _accept(answer: Answer, check: "CrossCheck") -> Part:
    if answer.part is None:
        if answer.no_room:
            raise HoldfastError(
                f"no room left on the disk ({answer.error}): free some space and call again; what is done is kept"
            )
        raise HoldfastError(answer.error)
    check.compare(answer.samples)
    return answer.part


def _append_ready(request: Request, workspace: Workspace) -> list[Part]:
    """Appends the parts whose turn it is. A bad line is reported here, where the lines before it have been counted."""
    appended = []
    while (part := workspace.next_part()) is not None:
        lines = _bad_lines(request, workspace, part) if part.bad else []
        if lines and request.on_bad_line == "fail":
            raise _bad_line_error(request, lines[0])
        workspace.append(part, b"".join(orjson.dumps(line) + b"\n" for line in lines))
        appended.append(part)
    return appended


def _bad_lines(request: Request, workspace: Workspace, part: Part) -> list[dict[str, Any]]:
    state = workspace.state
    line, offset = (state.line, state.offset) if part.file == state.file else (0, 0)
    if request.share:
        first = next(unit for unit in plan(request.files, request.share) if unit.file == part.file)
        before = lines_before(request.files, first)
        line, offset = line + before[0], offset + before[1]
    path = request.files[part.file].path
    return [
        {"file": path, "line": line + number + 1, "offset": offset + at, "reason": reason}
        for number, at, reason in part.bad
    ]


def _publish(
    request: Request, settings: dict[str, Any], workspace: Workspace, record: Path, memory: int, engine: str
) -> Summary:
    """Final names for everything: the indices after the tokens, and the record that says so last."""
    state = workspace.state
    pairs = workspace.finish(request.dtype)
    tokens = sum(key.bytes for key in state.keys) // request.dtype.itemsize
    summary = Summary(
        tuple(request.outputs),
        state.documents,
        sum(key.sequences for key in state.keys),
        tokens,
        state.size,
        state.size / tokens if tokens else 0.0,
        state.bad,
        state.seconds,
        memory,
        engine,
        str(record),
    )
    digests = {file.path: workspace.digests.get(file.number, "") for file in request.files}
    details = record_details(request, [(key.bytes, key.sequences, key.documents) for key in state.keys], digests)
    bad = Path(request.prefix + ".bad.jsonl")
    # The record of an older dataset goes before its files do, and the new one comes when all files have their names.
    record.unlink(missing_ok=True)
    if state.bad:
        publish_bytes(bad, (workspace.folder / "bad.jsonl").read_bytes())
    else:
        bad.unlink(missing_ok=True)
    publish_pairs([(*pair, output) for pair, output in zip(pairs, request.outputs, strict=True)])
    publish_bytes(record, describe(summary, settings, details))
    return summary


def record_details(request: Request, sizes: Sequence[tuple[int, int, int]], digests: dict[str, str]) -> dict[str, Any]:
    """What the record of a dataset says beside summary and settings; `sizes`: bytes, sequences, documents of each output."""
    outputs = [
        {
            "prefix": output,
            "bin_bytes": size,
            "idx_bytes": 34 + 12 * sequences + 8 * (documents + 1),
            "sequences": sequences,
            "documents": documents,
            "dtype": str(request.dtype),
        }
        for output, (size, sequences, documents) in zip(request.outputs, sizes, strict=True)
    ]
    tokenizer = {
        "type": request.recipe.tokenizer_type,
        "digest_sha256": request.recipe.digest,
        "vocab_size": request.recipe.vocab_size,
        "eod": request.recipe.eod,
    }
    return {
        "outputs": outputs,
        "input_digests_xxh3_128": digests,
        "tokenizer": tokenizer,
        "workers": request.workers,
    }


class CrossCheck:
    """A sample of every run's texts goes through the reference engine too; the first differing id ends the run."""

    def __init__(self, request: Request) -> None:
        self._recipe = request.recipe
        self._wanted = request.recipe.family == "json" and request.engine != "reference"
        self._reference: Tokenizer | None = None

    def load(self) -> None:
        if self._wanted and self._reference is None:
            self._reference = Tokenizer(self._recipe, "reference")
            give_back_memory()

    def compare(self, samples: Sequence[tuple[str, bytes]]) -> None:
        if not samples:
            return
        self.load()
        assert self._reference is not None
        ids, offsets = self._reference.encode_batch([text for text, _ in samples])
        for number, (text, got) in enumerate(samples):
            expected = ids[offsets[number] : offsets[number + 1]]
            if expected.tobytes() != got:
                raise HoldfastError(
                    f"the fast engine and {self._reference.engine} give different tokens for the text {text[:60]!r}...; "
                    "this is a bug of the fast engine: run again with --tokenizer-engine reference"
                )


def _own_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
