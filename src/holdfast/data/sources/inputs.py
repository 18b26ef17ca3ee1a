"""From what the user wrote after --input to a list of files with their kind: names, globs, folders, `-` for standard input.

The order is the user's; within a glob or a folder it is the order of the names, so that the dataset does not depend on the disk.
"""

import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.data.preprocess.provenance import read_provenance
from holdfast.data.sources import InputFile
from holdfast.data.sources.compressed import sniff
from holdfast.data.sources.recognition import wrong_encoding
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

PARQUET_MAGIC = b"PAR1"
INPUT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", ".xml", ".parquet")
# The index file beside a multistream dump is not text.
DUMP_INDEX_SUFFIX = "-multistream-index.txt"
COMPRESSION_SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
# Unfinished work of `preprocess`, indices of samples, and the files of launched jobs.
OWN_FOLDER_SUFFIXES = (".preprocessing", ".index", ".run")
HEAD_BYTES = 4096
# From this many files on, that are compressed in one piece each, every worker reads a file of its own.
SHARED_OUT_FROM = 8


def find_inputs(names: Sequence[str | Path], blank_line_documents: bool = False) -> list[InputFile]:
    """The files, in order; `blank_line_documents`: a text file holds a document between any two blank lines."""
    paths = [path for name in names for path in _expand(str(name))]
    if not paths:
        raise HoldfastError("there is no input; --input takes files, globs, folders, or - for standard input")
    files = [_classify(number, path) for number, path in enumerate(paths)]
    if blank_line_documents:
        files = [replace(file, source="passages") if file.source == "text" else file for file in files]
    whole = [file for file in files if file.compression and file.source == "jsonl"]
    if len(whole) >= SHARED_OUT_FROM:
        files = [replace(file, shared_out=bool(file.compression)) for file in files]
    return files


def _expand(name: str) -> list[str]:
    if name == "-":
        return [name]
    if os.path.isdir(name):
        # A link to a file that is gone is an input that cannot be read, and not one that is left out.
        paths = [path for path in Path(name).rglob("*") if path.is_file() or (path.is_symlink() and not path.exists())]
        texts = [path for path in paths if _is_input(path)]
        own = {folder for path in texts if (folder := _own_folder(Path(name), path))}
        for folder in sorted(own):  # said aloud: a folder of the user's may have such a name
            log(f"{folder} is left out: Holdfast writes folders of this name; to read it, give it to --input by itself")
        found = sorted(str(path) for path in texts if not _own_folder(Path(name), path))
        if not found:
            raise HoldfastError(
                f"the folder {name} holds no input (.jsonl, .json, .txt, .xml, .parquet, plain or compressed)"
            )
        return found
    if os.path.exists(name):
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
    if not found:
        raise HoldfastError(f"{name} does not exist" if not glob.has_magic(name) else f"no file matches {name}")
    return found


def _is_input(path: Path) -> bool:
    """Whether a file in a folder is text to read, by its name; what Holdfast itself wrote there is not."""
    name, bare = path.name, _uncompressed_name(path.name)
    if name.startswith(".") or name.endswith(".bad.jsonl") or bare.endswith(DUMP_INDEX_SUFFIX):
        return False
    if not bare.endswith(INPUT_SUFFIXES):
        return False
    return not (name.endswith(".json") and read_provenance(path))


def _own_folder(root: Path, path: Path) -> Path | None:
    """The folder below `root` that holds the file and that Holdfast writes beside a dataset, by its name."""
    return next(
        (root / above for above in path.relative_to(root).parents if above.name.endswith(OWN_FOLDER_SUFFIXES)), None
    )


def _uncompressed_name(name: str) -> str:
    for suffix in COMPRESSION_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _classify(number: int, path: str) -> InputFile:
    if path == "-":
        return InputFile(number, path, "jsonl", "", 0)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise HoldfastError(f"{path} is not a regular file; to read from a pipe, give --input - and redirect it")
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise HoldfastError(f"cannot read {path}: {error.strerror}") from error
    compression = sniff(head[:8])
    # Without a byte order mark such a file passes for UTF-8 with many zeros in it.
    if not compression and head[:4] != PARQUET_MAGIC and (explanation := wrong_encoding(head, path)):
        raise HoldfastError(f"{path}: {explanation}")
    bare = _uncompressed_name(path)
    if head[:4] == PARQUET_MAGIC:
        source = "parquet"
    elif bare.endswith(".txt"):
        source = "text"
    elif bare.endswith(".xml"):
        source = "wikipedia"
    else:
        source = "jsonl"
    return InputFile(number, path, source, compression, status.st_size)
