"""The verb `inspect`: finds the package that recognises a path, and prints its description.

A package is added by a line in KINDS: a module with `recognises(path) -> bool` and
`describe(path, samples) -> PathDescription`.
"""

import errno
import importlib
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result
from holdfast.system.errors import HoldfastError

KINDS: dict[str, str] = {
    "dataset": "holdfast.data.inspection",
    "run": "holdfast.report.inspection",
    "snapshot": "holdfast.snapshot.inspection",
    "checkpoint": "holdfast.conversion.inspection",
}


@dataclass(frozen=True)
class PathDescription:
    """What a path holds: facts for --json, lines of text. Problems make the exit code 1."""

    facts: dict[str, Any]
    lines: list[str]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DocumentSamples:
    """How many documents of a dataset to show, and the tokenizer that decodes them (None: show none)."""

    tokenizer: Callable[[], Any] | None = None
    documents: int = 3


def inspect_path(path: Path | str, samples: DocumentSamples | None = None) -> tuple[str, PathDescription]:
    """The kind of thing at `path`, and its description."""
    path = Path(path)
    missing = _check_type(path)
    for kind, name in KINDS.items():
        module = importlib.import_module(name)
        if module.recognises(path):
            description: PathDescription = module.describe(path, samples or DocumentSamples())
            return kind, description
    raise HoldfastError(missing or _unknown(path))


def _check_type(path: Path) -> str | None:
    """Refuses what cannot be read to its end, before anything opens it. Returns the error message for a path that does not exist,
    to be used if it is not the prefix of a dataset either."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if path.is_symlink():
            return f"{path} is a symbolic link to {os.readlink(path)}, which does not exist"
        return f"there is no file, folder or dataset {path}; for a dataset give PREFIX or PREFIX.idx"
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise HoldfastError(f"{path} is a symbolic link that leads to itself") from None
        raise HoldfastError(f"{path} cannot be read: {error.strerror}") from None
    special = {stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    if kind := special.get(stat.S_IFMT(mode)):
        raise HoldfastError(f"{path} is a {kind}; give a regular file or a folder")
    return None


def _unknown(path: Path) -> str:
    from holdfast.snapshot.report import run_folders_in

    if path.is_file():
        if not path.stat().st_size:
            return f"{path} is an empty file"
    elif not any(path.iterdir()):
        return f"{path} is an empty folder"
    elif runs := run_folders_in(path):
        return f"{path} is a folder of runs; inspect one of them: {', '.join(str(run) for run in runs)}"
    return f"{path} is none of: {', '.join(KINDS)}; for a dataset give PREFIX or PREFIX.idx"


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Describe a file or folder: counts, shapes, damage. Exits with 1 if something is wrong with it.

    Examples:

      holdfast inspect corpus_text_document
      holdfast inspect corpus_text_document \\
          --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt
      holdfast inspect runs/first
      holdfast inspect first-hf --json
    """

    path: str = field(metadata=positional())
    """Prefix of a dataset, or path of a run, snapshot, checkpoint or model."""
    tokenizer_type: str = "GPT2BPETokenizer"
    """Tokenizer of a dataset, to show its documents as text."""
    vocab_file: str | None = None
    """Vocabulary of the tokenizer, as for preprocess."""
    merge_file: str | None = None
    """Merges of the tokenizer, as for preprocess."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer, as for preprocess."""
    documents: int = 3
    """Number of documents of a dataset to show."""
    json: bool = False
    """Print the facts as JSON."""


def inspect(options: InspectOptions) -> None:
    def tokenizer() -> Any:
        from holdfast.tokenizers import build_tokenizer

        return build_tokenizer(options.tokenizer_type, options.vocab_file, options.merge_file, options.tokenizer_model)

    samples = DocumentSamples(tokenizer if options.vocab_file or options.tokenizer_model else None, options.documents)
    kind, description = inspect_path(options.path, samples)
    facts = {"kind": kind, **description.facts, "problems": description.problems}
    print_result(facts, "\n".join([f"{options.path}: {kind}", *description.lines]), options.json, indent=False)
    if description.problems:
        for problem in description.problems:
            print(f"problem: {problem}", file=sys.stderr)
        sys.exit(1)
