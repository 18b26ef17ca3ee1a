"""Reading .gz, .xz, .zst and .bz2: as one stream, or from any position where decoding can start.

Frames of zst, blocks of xz and streams of bz2 are decoded independently of each other, so several workers can share one file.
The invariant: a truncated or damaged file is an error that names it, never a quiet end.
"""

import bz2
import lzma
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, BinaryIO

from holdfast.system.errors import HoldfastError

READ_BYTES = 1 << 17
MAGICS = {b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst", b"BZh": "bz2"}
BZ2_STREAM = b"1AY&SY"


def sniff(magic: bytes) -> str:
    """The compression by a file's first bytes."""
    if len(magic) >= 4 and 0x184D2A50 <= struct.unpack("<I", magic[:4])[0] <= 0x184D2A5F:
        return "zst"  # a skippable frame in front, as pzstd writes it
    return next((name for start, name in MAGICS.items() if magic.startswith(start)), "")


def _decoder(compression: str) -> Callable[[], Any]:
    if compression == "gz":
        return lambda: zlib.decompressobj(wbits=31)
    if compression == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)
    if compression == "bz2":
        return bz2.BZ2Decompressor
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return context.decompressobj


def decompress(read: Callable[[int], bytes], compression: str, path: str) -> Iterator[bytes]:
    """The decoded content, piece by piece, over any number of members, streams or frames."""
    new = _decoder(compression)
    decoder: Any = None
    try:
        while piece := read(READ_BYTES):
            while piece:
                if decoder is None:
                    piece = piece.lstrip(b"\0") if compression in ("gz", "xz") else piece
                    if not piece:
                        break
                    decoder = new()
                decoded = decoder.decompress(piece)
                if decoded:
                    yield decoded
                piece = b""
                if decoder.eof:
                    piece, decoder = decoder.unused_data, None
    except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    except Exception as error:
        # zstandard's error class can only be named after importing it.
        if type(error).__name__ != "ZstdError":
            raise
        raise _damaged(path, error) from error
    if decoder is not None:
        raise HoldfastError(f"{path} ends in the middle of its compressed data: it was cut short; get it again")


def _damaged(path: str, error: Exception) -> HoldfastError:
    return HoldfastError(f"{path} is damaged: its compressed data cannot be decoded ({error}); get it again")


def open_stream(file: BinaryIO, compression: str, path: str) -> Iterator[bytes]:
    """The whole content of an open file, piece by piece, whatever its compression."""
    if compression:
        return decompress(file.read, compression, path)
    return iter(lambda: file.read(1 << 20), b"")


def decoding_starts(path: str, compression: str) -> list[int]:
    """Byte offsets in the file where a decoder can begin, ascending, beginning with 0 or the first frame's."""
    if compression == "zst":
        return _zst_frames(path)
    if compression == "xz":
        return [block.start for block in xz_blocks(path)]
    if compression == "bz2":
        return _bz2_streams(path)
    return [0]


def decode_from(path: str, compression: str, start: int, end: int | None) -> Iterator[bytes]:
    """What the frames (blocks, streams) that begin in [start, end) hold; without `end`, all to the end of the file."""
    if compression == "xz":
        yield from _decode_xz(path, start, end)
        return
    with open(path, "rb") as file:
        file.seek(start)
        left = (os.fstat(file.fileno()).st_size if end is None else end) - start

        def read(count: int) -> bytes:
            nonlocal left
            piece = file.read(min(count, left))
            left -= len(piece)
            return piece

        yield from decompress(read, compression, path)


def _zst_frames(path: str) -> list[int]:
    """Where frames begin, found by walking over block headers: nothing is decompressed."""
    starts = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        while position < size:
            head = os.pread(file.fileno(), 18, position)
            length, skippable = _zst_frame_length(file.fileno(), position, head, path)
            if not skippable:
                starts.append(position)
            position += length
    return starts


def _zst_frame_length(descriptor: int, position: int, head: bytes, path: str) -> tuple[int, bool]:
    if len(head) < 5:
        raise HoldfastError(f"{path} ends in the middle of its compressed data: it was cut short; get it again")
    magic = int.from_bytes(head[:4], "little")
    if 0x184D2A50 <= magic <= 0x184D2A5F:
        return 8 + int.from_bytes(head[4:8], "little"), True
    if magic != 0xFD2FB528:
        raise HoldfastError(f"{path} is damaged: no zstd frame begins at byte {position:,}; get it again")
    descriptor_byte = head[4]
    single_segment = descriptor_byte >> 5 & 1
    content_size_bytes = (1 if single_segment else 0, 2, 4, 8)[descriptor_byte >> 6]
    offset = position + 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor_byte & 3] + content_size_bytes
    last = 0
    while not last:
        block = os.pread(descriptor, 3, offset)
        if len(block) < 3:
            raise HoldfastError(f"{path} ends in the middle of its compressed data: it was cut short; get it again")
        header = int.from_bytes(block, "little")
        last, kind = header & 1, header >> 1 & 3
        offset += 3 + (1 if kind == 1 else header >> 3)
    return offset + (4 if descriptor_byte >> 2 & 1 else 0) - position, False


def _bz2_streams(path: str) -> list[int]:
    """Streams begin on a byte with BZh, a digit and the block magic: ten bytes that do not occur by chance."""
    import mmap
    import re

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [match.start() for match in re.finditer(rb"BZh[1-9]" + BZ2_STREAM, content)]


class XzBlock:
    """Where a block lies, and the header of its stream, which says how blocks are checked."""

    __slots__ = ("end", "header", "start")

    def __init__(self, start: int, end: int, header: bytes) -> None:
        self.start, self.end, self.header = start, end, header


@lru_cache(maxsize=4)
def xz_blocks(path: str) -> list[XzBlock]:
    """The blocks of all streams, read backwards from the stream footers; empty when the file has another structure."""
    blocks: list[XzBlock] = []
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        while end > 0:
            footer = os.pread(file.fileno(), 12, end - 12)
            if footer == b"\0" * 12 or (footer[8:] == b"\0" * 4):
                end -= 4  # stream padding
                continue
            if len(footer) < 12 or footer[10:] != b"YZ":
                raise HoldfastError(f"{path} does not end as an xz file does: it was cut short; get it again")
            index_size = (int.from_bytes(footer[4:8], "little") + 1) * 4
            sizes = _xz_index(os.pread(file.fileno(), index_size, end - 12 - index_size))
            start = end - 12 - index_size - sum(-(-size // 4) * 4 for size in sizes) - 12
            header = os.pread(file.fileno(), 12, start)
            if start < 0 or not header.startswith(b"\xfd7zXZ"):
                raise HoldfastError(f"{path} is damaged: its xz index does not fit; get it again")
            offset, stream = start + 12, []
            for size in sizes:
                padded = -(-size // 4) * 4
                stream.append(XzBlock(offset, offset + padded, header))
                offset += padded
            blocks[:0] = stream
            end = start
    return blocks


def _xz_index(index: bytes) -> list[int]:
    """Unpadded sizes of the blocks."""
    position = 1  # the first byte marks the index

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = index[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    sizes = []
    for _ in range(number()):
        sizes.append(number())
        number()  # the uncompressed size is not needed
    return sizes


def _decode_xz(path: str, start: int, end: int | None) -> Iterator[bytes]:
    """Each block behind its stream's header: the decoder checks the block and never sees an index that would not fit."""
    blocks = xz_blocks(path)
    first = bisect_left([block.start for block in blocks], start)
    with open(path, "rb") as file:
        for block in blocks[first:]:
            if end is not None and block.start >= end:
                return
            decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            file.seek(block.start)
            left = block.end - block.start
            try:
                decoder.decompress(block.header)
                while left:
                    piece = file.read(min(READ_BYTES, left))
                    left -= len(piece)
                    if not piece:
                        raise HoldfastError(f"{path} was cut short while it was read")
                    yield decoder.decompress(piece)
            except lzma.LZMAError as error:
                raise _damaged(path, error) from error
