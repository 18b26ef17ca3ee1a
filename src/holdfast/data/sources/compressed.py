"""Reading .gz, .xz, .zst and .bz2: as one stream, or from any position where decoding can start.

Frames of zst, blocks of xz and streams of bz2 are decoded independently of each other, so several workers can share one file.
The invariant: a truncated or damaged file raises an error that names it.
"""

import bz2
import lzma
import mmap
import os
import re
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

from holdfast.system.errors import HoldfastError

READ_BYTES = 1 << 17
MAGICS = {b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst", b"BZh": "bz2"}
BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
"""The start of a stream: BZh, a digit and the magic number of a block, ten bytes that do not occur by chance."""


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
        raise _cut_short(path)


def _cut_short(path: str) -> HoldfastError:
    return HoldfastError(f"{path} ends in the middle of its compressed data: it was cut short; get it again")


def _damaged(path: str, error: Exception | str) -> HoldfastError:
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
        return list(bz2_streams(path))
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
        raise _cut_short(path)
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
            raise _cut_short(path)
        header = int.from_bytes(block, "little")
        last, kind = header & 1, header >> 1 & 3
        offset += 3 + (1 if kind == 1 else header >> 3)
    return offset + (4 if descriptor_byte >> 2 & 1 else 0) - position, False


def bz2_streams(path: str) -> Iterator[int]:
    """Where streams begin. Reads no further than its caller asks."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for match in BZ2_STREAM.finditer(content):
            yield match.start()


class XzBlock(NamedTuple):
    """The place of a block, its decoded size, and the header of its stream, which says how blocks are checked."""

    start: int
    end: int
    size: int
    header: bytes


def xz_blocks(path: str) -> list[XzBlock]:
    """The blocks of all streams, read backwards from the stream footers; empty when the file has another structure."""
    status = os.stat(path)
    return _xz_blocks(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _xz_blocks(path: str, end: int, _modified: int) -> list[XzBlock]:
    """`end`: the size of the file, which may be another one under the same name later."""
    blocks: list[XzBlock] = []
    with open(path, "rb") as file:
        while end > 0:
            footer = os.pread(file.fileno(), 12, max(0, end - 12))
            if footer[8:] == b"\0" * 4:
                end -= 4  # stream padding
                continue
            index_end = end - 12
            if index_end < 12 or footer[10:] != b"YZ":
                raise HoldfastError(f"{path} does not end as an xz file does: it was cut short; get it again")
            index_start = max(0, index_end - (int.from_bytes(footer[4:8], "little") + 1) * 4)
            sizes = _xz_index(os.pread(file.fileno(), index_end - index_start, index_start), path)
            start = index_start - sum(packed for packed, _ in sizes) - 12
            header = os.pread(file.fileno(), 12, max(0, start))
            if start < 0 or not header.startswith(b"\xfd7zXZ"):
                raise _wrong_index(path)
            offset, stream = start + 12, []
            for packed, size in sizes:
                stream.append(XzBlock(offset, offset + packed, size, header))
                offset += packed
            blocks[:0] = stream
            end = start
    return blocks


def _wrong_index(path: str) -> HoldfastError:
    return HoldfastError(f"{path} is damaged: its xz index does not fit; get it again")


def _xz_index(index: bytes, path: str) -> list[tuple[int, int]]:
    """The sizes of the blocks: in the file, with their padding, and decoded."""
    if zlib.crc32(index[:-4]) != int.from_bytes(index[-4:], "little"):
        raise _wrong_index(path)
    position = 1  # the first byte marks the index

    def number() -> int:
        nonlocal position
        value = 0
        for shift, byte in zip(range(0, 63, 7), index[position : position + 9], strict=False):
            position += 1
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
        raise _wrong_index(path)

    return [(-(-number() // 4) * 4, number()) for _ in range(number())]


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
            left, size = block.end - block.start, 0
            try:
                decoder.decompress(block.header)
                while left:
                    piece = file.read(min(READ_BYTES, left))
                    left -= len(piece)
                    if not piece:
                        raise HoldfastError(f"{path} was cut short while it was read")
                    decoded = decoder.decompress(piece)
                    size += len(decoded)
                    yield decoded
            except lzma.LZMAError as error:
                raise _damaged(path, error) from error
            # A damaged end of a block makes the decoder wait for more; only the size shows it.
            if size != block.size:
                raise _damaged(path, f"the block at byte {block.start:,} has another size than the index says")
