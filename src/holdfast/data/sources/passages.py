"""Plain text with several documents in a file, separated by blank lines (`--blank-line-documents`).

One reader cuts the file at blank lines and feeds all workers: finding a blank line is far cheaper than tokenizing. The
invariant: a unit holds whole documents, and what stands between two blank lines is one of them or reported as bad.
"""

from collections.abc import Iterator, Sequence

from holdfast.data.sources import BadLine, DocumentBatch, InputFile, Unit
from holdfast.data.sources.prefetch import fed_units
from holdfast.data.sources.text import BYTE_ORDER_MARK

BLANK_LINES = (b"\n\n", b"\n\r\n")


def units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    return fed_units(file, unit_bytes, BLANK_LINES)


def read(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    content = unit.data
    batch = DocumentBatch([[] for _ in keys], content.count(b"\n"), len(content), content=content)
    if content and not content.endswith(b"\n"):
        batch.lines += 1
    for begin, document in _documents(content):
        try:
            text = document.decode()
            if unit.start == 0 and begin == 0 and not (text := text.removeprefix(BYTE_ORDER_MARK)):
                continue
        except UnicodeDecodeError as error:
            at = begin + error.start
            reason = f"it is not UTF-8 ({error.reason}), so its passage is not a document"
            batch.bad.append(BadLine(content.count(b"\n", 0, at), at, reason))
            continue
        for column in batch.values:
            column.append(text)
    yield batch


def _documents(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each document begins, and its lines; a line of blanks alone is a blank line."""
    begin, end, at = -1, 0, 0
    for line in [*content.split(b"\n"), b""]:
        if line.strip():
            begin = at if begin < 0 else begin
            end = at + len(line)
        elif begin >= 0:
            yield begin, content[begin:end].replace(b"\r\n", b"\n").rstrip()
            begin = -1
        at += len(line) + 1
