"""A worker of `preprocess`: takes units from its connection, writes each as a part, answers with what the part holds.

`muster` is where its process starts. It loads the tokenizer once and forks the other workers, so that a crowd of them shares one
copy of it. The caller's own process is forked only by the program, before it has loaded anything (`ahead`).
The invariant: a worker lives no longer than the other end of its connection, and a part that is answered for is complete.
"""

import contextlib
import ctypes
import gc
import os
import resource
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import xxhash

from holdfast.data.preprocess.encode import Encoded, encode_documents
from holdfast.data.preprocess.sentences import Splitter
from holdfast.data.sources import Batch, Unit, read_unit
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import Recipe
from holdfast.tokenizers.tokenizer import EngineChoice, Tokenizer

# A worker whose memory passes this builds its tokenizer anew: engines cache the words they have seen.
MEMORY_LIMIT_BYTES = 300 << 20
REBUILD_AFTER_UNITS = 64
SAMPLE_TEXT_CHARACTERS = 512
FIRST_SAMPLE_TEXTS = 24


@dataclass(frozen=True)
class Job:
    """What all workers of a run are told once."""

    keys: tuple[str, ...]
    eod: int | None
    dtype: str
    folder: str
    language: str | None = None
    """Cut texts into sentences of this language."""
    keep_newlines: bool = False


@dataclass
class Part:
    """What a unit came to. The files of the part lie in the folder of the job until they are appended to the dataset."""

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
class Answer:
    part: Part | None = None
    error: str = ""
    no_room: bool = False
    samples: list[tuple[str, bytes]] = field(default_factory=list)
    """Texts with the ids (uint32) that went into the part, for the caller to compare with the reference engine."""
    memory: int = 0


def part_path(folder: str | Path, unit: int, key: int) -> Path:
    return Path(folder, f"{unit:010d}-{key}.part")


def process_unit(job: Job, tokenizer: Tokenizer, splitter: Splitter | None, number: int, unit: Unit) -> Answer:
    """Reads, tokenizes and writes one unit. A part file is tokens, then lengths (int32), then document ends (int64)."""
    part = Part(number, unit.file, weight=unit.weight)
    answer = Answer(part)
    digest = xxhash.xxh3_128()
    lengths: list[list[np.ndarray]] = [[] for _ in job.keys]
    ends: list[list[np.ndarray]] = [[] for _ in job.keys]
    part.sequences, part.tokens = [0] * len(job.keys), [0] * len(job.keys)
    files = [part_path(job.folder, number, key).open("wb", buffering=0) for key in range(len(job.keys))]
    try:
        for batch in read_unit(unit, job.keys):
            digest.update(batch.content)
            _count(part, batch)
            for key, values in enumerate(batch.values):
                if splitter is not None:
                    values = [splitter.split(value) if isinstance(value, str) else value for value in values]
                encoded = encode_documents(values, tokenizer, job.eod, job.dtype)
                if not tokenizer.is_reference:
                    answer.samples += _sample(encoded, number, tokenizer)
                _write(files[key], encoded.tokens)
                lengths[key].append(encoded.lengths)
                ends[key].append(encoded.documents + part.sequences[key])
                part.sequences[key] += len(encoded.lengths)
                part.tokens[key] += len(encoded.tokens)
        for key, file in enumerate(files):
            _write(file, np.concatenate([np.empty(0, np.int32), *lengths[key]]))
            _write(file, np.concatenate([np.empty(0, np.int64), *ends[key]]))
    finally:
        for file in files:
            file.close()
    part.digest = digest.hexdigest()
    return answer


def _count(part: Part, batch: Batch) -> None:
    part.bad += [(part.lines + bad.line, part.size + bad.offset, bad.reason) for bad in batch.bad]
    part.lines += batch.lines
    part.size += batch.size
    part.documents += batch.documents


def _write(file: object, array: np.ndarray) -> None:
    view = np.ascontiguousarray(array).view(np.uint8).data
    while view:
        view = view[file.write(view) :]  # type: ignore[attr-defined]


def _sample(encoded: Encoded, number: int, tokenizer: Tokenizer) -> list[tuple[str, bytes]]:
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


def serve(job: Job, tokenizer: Tokenizer, connection: Connection) -> None:
    """The engine's name, then units in, answers out, until the other end is gone."""
    splitter = Splitter(job.language, job.keep_newlines) if job.language else None
    # Batches are plain lists and strings without cycles: collecting would only walk over them again and again.
    gc.disable()
    connection.send(tokenizer.engine)
    since_built = 0
    while True:
        number, unit = connection.recv()
        answer = _process(job, tokenizer, splitter, number, unit)
        answer.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send(answer)
        since_built += 1
        if since_built >= REBUILD_AFTER_UNITS and _resident_bytes() > MEMORY_LIMIT_BYTES:
            tokenizer, since_built = tokenizer.fresh_copy(), 0


def _process(job: Job, tokenizer: Tokenizer, splitter: Splitter | None, number: int, unit: Unit) -> Answer:
    try:
        return process_unit(job, tokenizer, splitter, number, unit)
    except HoldfastError as error:
        return Answer(error=str(error))
    except OSError as error:
        import errno

        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return Answer(error=f"{error.strerror}: {error.filename or unit.path}", no_room=full)
    except Exception:
        return Answer(error=f"a worker failed on {unit}:\n{traceback.format_exc()}")


def give_back_memory() -> None:
    """What building a tokenizer needed and freed goes back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def build(recipe: Recipe, engine: EngineChoice) -> Tokenizer | HoldfastError:
    """The tokenizer, or what is wrong with it."""
    try:
        tokenizer = Tokenizer(recipe, engine)
    except HoldfastError as error:
        return error
    give_back_memory()
    return tokenizer


def lead(tokenizer: Tokenizer | HoldfastError, job: Job, descriptors: Sequence[int]) -> int:
    """Forks a worker per descriptor but the first, and is the first worker itself; the exit status."""
    if isinstance(tokenizer, HoldfastError):
        for descriptor in descriptors:
            Connection(descriptor).send(tokenizer)
        return 1
    own, *others = descriptors
    gc.freeze()
    children = []
    for descriptor in others:
        child = os.fork()
        if child == 0:
            for other in (own, *others):
                if other != descriptor:
                    os.close(other)
            os._exit(_be_worker(job, tokenizer, descriptor))
        children.append(child)
    for descriptor in others:
        os.close(descriptor)
    # This process works, too: one that only waited would hold the memory of a worker for nothing.
    status = _be_worker(job, tokenizer, own)
    for child in children:
        _, code = os.waitpid(child, 0)
        if code:
            status = 128 + os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)
    return status


def _be_worker(job: Job, tokenizer: Tokenizer, descriptor: int) -> int:
    try:
        serve(job, tokenizer, Connection(descriptor))
    except (EOFError, ConnectionError):
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    raise AssertionError("serve ends with its connection")
