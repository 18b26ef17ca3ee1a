"""Cutting a file of lines into stretches that can be read alone, wherever the cuts fall.

The convention: a stretch owns the lines that begin after its first byte, up to and including the one that begins right at its
end; the first stretch of a file also owns the line at byte 0. So a reader is independent of its neighbours: it skips
through the first line break, and reads on through the first line break behind its end.
"""

import os
import sys
from collections.abc import Callable, Iterator

from holdfast.data.sources import InputFile, Unit
from holdfast.data.sources.compressed import decode_from, decoding_starts, open_stream, sniff
from holdfast.data.sources.prefetch import prefetched

BLOCK_BYTES = 4 << 20
TAIL_BYTES = 1 << 16


def line_units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    """The units of a file of lines, of about `unit_bytes` each; compressed ones hold a few times as much text."""
    if file.path == "-" or file.compression:
        starts = [0] if file.path == "-" else decoding_starts(file.path, file.compression)
        if len(starts) > 1:
            yield from _frame_units(file, starts, unit_bytes)
        elif file.shared_out:
            yield Unit(file.number, file.path, file.source, "stream", 0, file.size, 0, file.size)
        else:
            yield from prefetched(_fed_units(file, unit_bytes), unit_bytes)
    else:
        for start in range(0, file.size, unit_bytes):
            end = min(start + unit_bytes, file.size)
            yield Unit(file.number, file.path, file.source, "range", start, end, start, end - start)


def _frame_units(file: InputFile, starts: list[int], unit_bytes: int) -> Iterator[Unit]:
    begin = starts[0]
    for start in [*starts[1:], file.size]:
        # Text compresses to a third or less: frames are combined until a unit is large enough.
        if start - begin >= unit_bytes // 4 or start == file.size:
            first = begin == starts[0]
            how = "first frames" if first else "frames"
            yield Unit(file.number, file.path, file.source, how, begin, start, begin, start - begin)
            begin = start


def _fed_units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    """Units that carry their lines: one reader decompresses, all workers tokenize."""
    # Standard input has no name to open; closefd leaves it open for later readers.
    with open(sys.stdin.fileno() if file.path == "-" else file.path, "rb", closefd=file.path != "-") as stream:
        before = 0
        compression = file.compression or sniff(stream.peek(8)[:8])
        for number, block in enumerate(whole_lines(open_stream(stream, compression, file.path), unit_bytes)):
            at = min(stream.tell(), file.size) if file.size else 0
            yield Unit(file.number, file.path, file.source, "fed", number, number + 1, 0, at - before, block)
            before = at


def unit_lines(unit: Unit) -> Iterator[bytes]:
    """The lines that a unit owns, in blocks of whole lines."""
    if unit.how == "fed":
        return iter([unit.data])
    if unit.how == "range":
        return _range_lines(unit)
    with open(unit.path, "rb") as file:
        compression = sniff(file.read(8))
    if unit.how == "stream":
        return _stream_lines(unit, compression)
    own = decode_from(unit.path, compression, unit.start, unit.end)
    return whole_lines(
        own, BLOCK_BYTES, skip=unit.how == "frames", rest=lambda: decode_from(unit.path, compression, unit.end, None)
    )


def _stream_lines(unit: Unit, compression: str) -> Iterator[bytes]:
    with open(unit.path, "rb") as file:
        yield from whole_lines(open_stream(file, compression, unit.path), BLOCK_BYTES)


def _range_lines(unit: Unit) -> Iterator[bytes]:
    with open(unit.path, "rb", buffering=0) as file:
        descriptor = file.fileno()

        def own() -> Iterator[bytes]:
            for position in range(unit.start, unit.end, BLOCK_BYTES):
                yield os.pread(descriptor, min(BLOCK_BYTES, unit.end - position), position)

        def rest() -> Iterator[bytes]:
            position = unit.end
            while piece := os.pread(descriptor, TAIL_BYTES, position):
                yield piece
                position += len(piece)

        yield from whole_lines(own(), BLOCK_BYTES, skip=unit.start > 0, rest=rest)


def whole_lines(
    own: Iterator[bytes],
    block_bytes: int,
    *,
    skip: bool = False,
    rest: Callable[[], Iterator[bytes]] = lambda: iter(()),
) -> Iterator[bytes]:
    """Blocks of at least `block_bytes`, each ending with a line break (the last one may lack it at the end of the file)."""
    held: list[bytes] = []
    size = 0
    for piece in own:
        if skip:
            at = piece.find(b"\n")
            if at < 0:
                continue
            skip, piece = False, piece[at + 1 :]
        held.append(piece)
        size += len(piece)
        if size > block_bytes and (at := piece.rfind(b"\n")) >= 0:
            held[-1] = piece[: at + 1]
            yield b"".join(held)
            held = [piece[at + 1 :]]
            size = len(held[0])
    if skip:
        return
    for piece in rest():
        at = piece.find(b"\n")
        held.append(piece if at < 0 else piece[: at + 1])
        if at >= 0:
            break
    block = b"".join(held)
    if block:
        yield block
