"""Plain text: a file ending in .txt (plain or compressed) is one document, whatever the keys are called."""

import os
from collections.abc import Iterator, Sequence

from holdfast.data.sources import BadLine, DocumentBatch, InputFile, Unit
from holdfast.data.sources.compressed import open_stream, sniff

BYTE_ORDER_MARK = "\ufeff"
"""Some editors write it at the start of a file; it is no part of the text."""


def units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    yield Unit(file.number, file.path, file.source, "whole", 0, file.size, 0, file.size)


def read(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    with open(unit.path, "rb") as file:
        compression = sniff(os.pread(file.fileno(), 8, 0))
        content = b"".join(open_stream(file, compression, unit.path))
    lines = content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
    try:
        text = content.decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        bad = BadLine(line, error.start, f"it is not UTF-8 ({error.reason}), so the file is not a document")
        yield DocumentBatch([[] for _ in keys], lines, len(content), [bad], content)
        return
    yield DocumentBatch([[text] for _ in keys], lines, len(content), content=content)
