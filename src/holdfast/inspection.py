"""The verb `inspect`: finds out what a path is and has that part of Holdfast describe it.

A part is added by a line in KINDS: a module with `recognises(path) -> bool` and `describe(path, reader) -> Description`.
"""

import errno
import importlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.command_line.flags import positional
from holdfast.system.errors import HoldfastError

KINDS: dict[str, str] = {
    "dataset": "holdfast.data.inspection",
    "run": "holdfast.report.inspection",
    "snapshot": "holdfast.snapshot.inspection",
    "checkpoint": "holdfast.conversion.inspection",
}


@dataclass(frozen=True)
class Description:
    """What a path holds: facts for machines, lines for people. Problems make the exit code 1."""

    facts: dict[str, Any]
    lines: list[str]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """What helps to read the content: a tokenizer, if its files are given, and how many examples to show."""

    tokenizer: Callable[[], Any] | None = None
    documents: int = 3


def inspect_path(path: Path | str, reader: Reader | None = None) -> tuple[str, Description]:
    """The kind of thing at `path`, and its description."""
    path = Path(path)
    missing = _check_type(path)
    for kind, name in KINDS.items():
        module = importlib.import_module(name)
        if module.recognises(path):
            description: Description = module.describe(path, reader or Reader())
            return kind, description
    raise HoldfastError(missing or _unknown(path))


def _check_type(path: Path) -> str | None:
    """Refuses what cannot be read to its end, before anything opens it. The error to raise if `path`, which does not exist, is
    not the prefix of a dataset either."""
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
    return f"{path} is nothing that Holdfast knows ({', '.join(KINDS)}); for a dataset give PREFIX or PREFIX.idx"


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Describe a file or folder: counts, shapes, health. Exit code 1 when something is wrong with it.

    Examples:

      holdfast inspect corpus_text_document
      holdfast inspect corpus_text_document \\
          --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt
      holdfast inspect runs/first
      holdfast inspect first-hf --json
    """

    path: str = field(metadata=positional())
    """Prefix of a dataset, or the path of anything else that Holdfast reads or writes."""
    tokenizer_type: str = "GPT2BPETokenizer"
    """Tokenizer of a dataset, to show its documents as text."""
    vocab_file: str | None = None
    """As for preprocess."""
    merge_file: str | None = None
    """As for preprocess."""
    tokenizer_model: str | None = None
    """As for preprocess."""
    documents: int = 3
    """How many documents of a dataset to show."""
    json: bool = False
    """Print the facts as JSON."""


def inspect(options: InspectOptions) -> None:
    import sys

    def tokenizer() -> Any:
        from holdfast.tokenizers import build_tokenizer

        return build_tokenizer(options.tokenizer_type, options.vocab_file, options.merge_file, options.tokenizer_model)

    reader = Reader(tokenizer if options.vocab_file or options.tokenizer_model else None, options.documents)
    kind, description = inspect_path(options.path, reader)
    if options.json:
        import orjson

        facts = {"kind": kind, **description.facts, "problems": description.problems}
        print(orjson.dumps(facts, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode())
    else:
        print("\n".join([f"{options.path}: {kind}", *description.lines]))
    if description.problems:
        for problem in description.problems:
            print(f"problem: {problem}", file=sys.stderr)
        sys.exit(1)
