"""A worker of `preprocess`: reads units from its connection, writes each as a part, answers with what the part holds.

The invariant: a worker lives no longer than the other end of its connection, and a part that it answers for is complete.
"""

import contextlib
import ctypes
import errno
import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from holdfast.data.preprocess.encode import EncodedDocuments, encode_documents
from holdfast.data.preprocess.sentences import SentenceSplitter
from holdfast.data.sources import DocumentBatch, Unit, Value, read_unit
from holdfast.system.descriptors import write_all
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import Recipe
from holdfast.tokenizers.tokenizer import EngineChoice, Tokenizer

# A worker whose memory passes this builds its tokenizer again: engines cache the words they have seen.
MEMORY_LIMIT_BYTES = 300 << 20
REBUILD_AFTER_UNITS = 64
SAMPLE_TEXT_CHARACTERS = 512
FIRST_SAMPLE_TEXTS = 24


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker of a run needs to know once."""

    recipe: Recipe
    engine: EngineChoice
    keys: tuple[str, ...]
    eod: int | None
    dtype: str
    language: str | None = None
    """Split texts into sentences of this language."""
    keep_newlines: bool = False


@dataclass
class EncodedPart:
    """An encoded unit. Its files are in the parts folder until they are appended to the dataset."""

    unit: int
    file: int
    lines: int = 0
    size: int = 0
    documents: int = 0
    tokens: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    """Bad lines: number and byte offset within the unit, and the reason."""
    digest: str = ""
    weight: int = 0


@dataclass
class UnitResult:
    part: EncodedPart | None = None
    error: str = ""
    disk_full: bool = False
    samples: list[tuple[str, bytes]] = field(default_factory=list)
    """Texts with the ids (uint32) that went into the part, for the caller to compare with the reference engine."""
    memory: int = 0


def part_path(folder: str | Path, unit: int, key: int) -> Path:
    return Path(folder, f"{unit:010d}-{key}.part")


class UnitEncoder:
    """Reads, tokenizes and writes units. A part file is tokens, then lengths (int32), then document ends (int64)."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._tokenizer = Tokenizer(setup.recipe, setup.engine)
        release_memory()
        self._splitter = SentenceSplitter(setup.language, setup.keep_newlines) if setup.language else None
        self._units = 0
        """Units since the tokenizer was built."""

    @property
    def engine(self) -> str:
        return self._tokenizer.engine

    def encode(self, number: int, unit: Unit, folder: Path) -> UnitResult:
        """Writes the part of a unit; every error becomes part of the result."""
        try:
            result = self._write_part(number, unit, folder)
        except HoldfastError as error:
            result = UnitResult(error=str(error))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            result = UnitResult(error=f"{error.strerror}: {error.filename or unit.path}", disk_full=full)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # libraries in Rust raise their panics past Exception
            result = UnitResult(error=f"a worker failed on {unit}:\n{traceback.format_exc()}")
        result.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return result

    def _write_part(self, number: int, unit: Unit, folder: Path) -> UnitResult:
        keys = range(len(self._setup.keys))
        part = EncodedPart(number, unit.file, weight=unit.weight, tokens=[0 for _ in keys], sequences=[0 for _ in keys])
        result = UnitResult(part)
        digest = xxhash.xxh3_128()
        lengths: list[list[np.ndarray]] = [[] for _ in keys]
        ends: list[list[np.ndarray]] = [[] for _ in keys]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(part_path(folder, number, key).open("wb", buffering=0)) for key in keys]
            for batch in read_unit(unit, self._setup.keys):
                digest.update(batch.content)
                _count(part, batch)
                for key, values in enumerate(batch.values):
                    encoded = self._encode_batch(values)
                    if not self._tokenizer.is_reference:
                        result.samples += _sample(encoded, number, self._tokenizer)
                    _write(files[key], encoded.tokens)
                    lengths[key].append(encoded.lengths)
                    ends[key].append(encoded.documents + part.sequences[key])
                    part.sequences[key] += len(encoded.lengths)
                    part.tokens[key] += len(encoded.tokens)
            for key, file in enumerate(files):
                _write(file, np.concatenate([np.empty(0, np.int32), *lengths[key]]))
                _write(file, np.concatenate([np.empty(0, np.int64), *ends[key]]))
        part.digest = digest.hexdigest()
        return result

    def _encode_batch(self, values: list[Value]) -> EncodedDocuments:
        if self._splitter is not None:
            values = [self._splitter.split(value) if isinstance(value, str) else value for value in values]
        return encode_documents(values, self._tokenizer, self._setup.eod, self._setup.dtype)

    def limit_memory(self) -> None:
        """Builds the tokenizer again when its cache has grown too large."""
        self._units += 1
        if self._units >= REBUILD_AFTER_UNITS and _resident_bytes() > MEMORY_LIMIT_BYTES:
            self._tokenizer, self._units = self._tokenizer.fresh_copy(), 0


def _count(part: EncodedPart, batch: DocumentBatch) -> None:
    part.bad += [(part.lines + bad.line, part.size + bad.offset, bad.reason) for bad in batch.bad]
    part.lines += batch.lines
    part.size += batch.size
    part.documents += batch.documents


def _write(file: BinaryIO, array: np.ndarray) -> None:
    write_all(file.fileno(), np.ascontiguousarray(array).view(np.uint8).data)


def _sample(encoded: EncodedDocuments, number: int, tokenizer: Tokenizer) -> list[tuple[str, bytes]]:
    """A text of the batch, chosen by the unit's number; several of the first unit. The reference engine is slow: of a long text
    it gets the beginning, which is encoded here once more by itself."""
    count = len(encoded.texts)
    wanted = FIRST_SAMPLE_TEXTS if number == 0 else 1
    samples = []
    for i in sorted({(number * 2654435761 + turn * 40503) % count for turn in range(wanted)} if count else ()):
        text, ids = encoded.texts[i], encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]]
        if len(text) > SAMPLE_TEXT_CHARACTERS:
            text = text[:SAMPLE_TEXT_CHARACTERS]
            ids = tokenizer.encode_batch([text])[0]
        samples.append((text, ids.tobytes()))
    return samples


def release_memory() -> None:
    """Returns to the system what building a tokenizer has freed."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """The entry point of the process that a pool starts: receives a WorkerSetup, loads the tokenizer, forks the workers.

    Its arguments are the descriptors of the workers' sockets. It exits with the status of the first worker that fails.
    """
    connections = [Connection(int(descriptor)) for descriptor in sys.argv[1:]]
    status = 0
    try:
        encoder = UnitEncoder(connections[0].recv())
        status = fork_workers(encoder, connections)
    except HoldfastError as error:
        for connection in connections:
            connection.send(error)
    except (EOFError, ConnectionError):
        pass  # the parent has closed the connections, or is gone
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # without the time it takes to free the tokenizer's tables


def fork_workers(encoder: UnitEncoder, connections: Sequence[Connection]) -> int:
    """Forks a worker per connection and waits for them; the others end when one fails. Returns its status as a shell would."""
    # Workers share pages that they do not write to. Batches are plain lists and strings without cycles: a collection would only
    # walk over them again and again.
    gc.freeze()
    gc.disable()
    workers: set[int] = set()
    for own in connections:
        worker = os.fork()
        if worker == 0:
            for other in connections:
                if other is not own:
                    other.close()
            serve(encoder, own)
            return 0
        workers.add(worker)
    for connection in connections:
        connection.close()
    while workers:
        worker, code = os.wait()
        workers.remove(worker)
        if code:
            for sibling in workers:
                os.kill(sibling, signal.SIGKILL)
            return 128 + os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)
    return 0


def serve(encoder: UnitEncoder, connection: Connection) -> None:
    """Sends the engine's name; then receives units and sends results, until the parent is gone."""
    connection.send(encoder.engine)
    while True:
        connection.send(encoder.encode(*connection.recv()))
        encoder.limit_memory()
