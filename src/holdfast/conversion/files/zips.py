"""Mapped files, and zips inside them, opened without extraction.

The invariant: a zip is read only if its central directory, its local headers and its sizes agree, no two members overlap
or share a name, and no name points outside. Members are reached by exact name; nothing is unpacked to a path that the
archive chose.
"""

import mmap
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from holdfast.conversion.files.budget import MAX_MEMBERS, Budget
from holdfast.system.bounded_files import open_regular
from holdfast.system.errors import HoldfastError

MAX_DIRECTORY_BYTES = 16 << 20
MAX_RATIO = 20
BLOCK = 1 << 20
CRC_BLOCK = 32 << 20
MAX_INFLATED_BYTES = 64 << 30


@dataclass(frozen=True)
class Region:
    """A range of bytes of a mapped file, and what to call it in messages."""

    name: str
    data: memoryview
    mapping: mmap.mmap | None = None

    def part(self, start: int, length: int, name: str | None = None) -> "Region":
        if start < 0 or length < 0 or start + length > len(self.data):
            raise HoldfastError(f"{name or self.name} ends beyond its file: the file is cut short or forged")
        return Region(name or self.name, self.data[start : start + length], self.mapping)

    def drop_pages(self) -> None:
        """Releases the mapped pages, so that resident memory does not grow to the size of the file."""
        if self.mapping is not None:
            self.mapping.madvise(mmap.MADV_DONTNEED)


def map_file(path: Path) -> Region:
    with open_regular(path) as file:
        return _mapped(file, str(path))


def _mapped(file: IO[bytes], name: str) -> Region:
    if file.seek(0, 2) == 0:
        raise HoldfastError(f"{name} is empty")
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Region(name, memoryview(mapping), mapping)


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    """Of the local header."""
    packed: int
    size: int
    method: int
    crc: int


def is_zip(region: Region) -> bool:
    return bytes(region.data[:4]) == b"PK\x03\x04"


def read_directory(region: Region, budget: Budget) -> dict[str, Member]:
    """The members of a zip by name, after every check that does not need their content."""
    count, size, start = _end_of_directory(region)
    budget.members -= count
    if budget.members < 0:
        _bad_zip(region, f"more than {MAX_MEMBERS:,} members in all zips of the source")
    if size > MAX_DIRECTORY_BYTES or start + size > len(region.data):
        _bad_zip(region, "its directory is too large or lies outside the file")
    directory, members, at = bytes(region.data[start : start + size]), [], 0
    for _ in range(count):
        if at + 46 > size or directory[at : at + 4] != b"PK\x01\x02":
            _bad_zip(region, "its directory is broken")
        fields = struct.unpack("<HHHHHHIIIHHHHHII", directory[at + 4 : at + 46])
        flags, method, crc, packed, plain = fields[2], fields[3], fields[6], fields[7], fields[8]
        lengths, attributes, offset = fields[9:12], fields[14], fields[15]
        end = at + 46 + sum(lengths)
        raw = directory[at + 46 : at + 46 + lengths[0]]
        extra = directory[at + 46 + lengths[0] : at + 46 + lengths[0] + lengths[1]]
        at = end
        plain, packed, offset = _zip64(region, extra, plain, packed, offset)
        name = _member_name(region, raw, flags, attributes)
        if method not in (0, 8) or (method == 0 and packed != plain):
            _bad_zip(region, f"{name} has an unknown or contradictory compression")
        if plain > MAX_RATIO * packed + 1024 or plain > MAX_INFLATED_BYTES:
            _bad_zip(
                region,
                f"{name} would inflate {plain / max(1, packed):,.0f} times; weights inflate less than {MAX_RATIO} times",
            )
        members.append(Member(name, offset, packed, plain, method, crc))
    if at != size:
        _bad_zip(region, "its directory counts fewer members than it holds")
    if not members:
        _bad_zip(region, "its directory is empty")
    _check_overlap(region, members, start)
    named = {member.name: member for member in members}
    if len(named) != len(members):
        _bad_zip(region, "two members have the same name")
    return named


def _end_of_directory(region: Region) -> tuple[int, int, int]:
    tail_start = max(0, len(region.data) - 65557)
    tail = bytes(region.data[tail_start:])
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        _bad_zip(region, "its directory is missing: the file is cut short")
    _, _, _, count, size, start, _ = struct.unpack("<HHHHIIH", tail[at + 4 : at + 22])
    locator = tail_start + at - 20
    if locator >= 0 and bytes(region.data[locator : locator + 4]) == b"PK\x06\x07":
        record = struct.unpack("<Q", region.data[locator + 8 : locator + 16])[0]
        if record + 56 > len(region.data) or bytes(region.data[record : record + 4]) != b"PK\x06\x06":
            _bad_zip(region, "its directory is broken")
        count, size, start = struct.unpack("<QQQ", region.data[record + 32 : record + 56])
    return count, size, start


def _zip64(region: Region, extra: bytes, plain: int, packed: int, offset: int) -> tuple[int, int, int]:
    if 0xFFFFFFFF not in (plain, packed, offset):
        return plain, packed, offset
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            whole = min(length, len(extra) - at - 4) // 8
            values = list(struct.unpack_from(f"<{whole}Q", extra, at + 4))
            sizes = [plain, packed, offset]
            for index in (index for index, value in enumerate(sizes) if value == 0xFFFFFFFF):
                sizes[index] = values.pop(0) if values else _bad_zip(region, "its directory is broken")
            return sizes[0], sizes[1], sizes[2]
        at += 4 + length
    _bad_zip(region, "its directory is broken")


def _member_name(region: Region, raw: bytes, flags: int, attributes: int) -> str:
    name = raw.decode("utf-8", "replace")
    if flags & 0x2041:
        _bad_zip(region, f"{name} is encrypted")
    if (attributes >> 16) & 0o170000 == 0o120000:
        _bad_zip(region, f"{name} is a symbolic link")
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/") or ":" in name.split("/")[0]:
        _bad_zip(region, f"{name!r} points outside the archive")
    return name


def _check_overlap(region: Region, members: list[Member], directory: int) -> None:
    ordered = sorted(members, key=lambda member: member.offset)
    for member, following in zip(ordered, [m.offset for m in ordered[1:]] + [directory], strict=True):
        if member.offset + 30 + member.packed > following:
            _bad_zip(region, f"{member.name} overlaps what follows it")


def open_member(region: Region, member: Member) -> Region:
    """The content of a member: in place if it is stored, inflated once into a temporary file if not."""
    name = f"{region.name}:{member.name}"
    header = bytes(region.part(member.offset, 30, name).data)
    if header[:4] != b"PK\x03\x04":
        _bad_zip(region, f"{member.name} has no header")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    local = bytes(region.part(member.offset + 30, name_length, name).data)
    if local.decode("utf-8", "replace") != member.name or struct.unpack("<H", header[8:10])[0] != member.method:
        _bad_zip(region, f"{member.name} has another name in its own header")
    packed = region.part(member.offset + 30 + name_length + extra_length, member.packed, name)
    return packed if member.method == 0 else _inflate(packed, member, name)


def check_crc(region: Region, crc: int) -> None:
    """Compares a member's content with the checksum that the zip declares for it."""
    found = 0
    for start in range(0, len(region.data), CRC_BLOCK):
        found = zlib.crc32(region.data[start : start + CRC_BLOCK], found)
        region.drop_pages()
    if found != crc:
        raise HoldfastError(f"{region.name} is damaged: its content does not match its checksum (CRC-32)")


def _inflate(packed: Region, member: Member, name: str) -> Region:
    written, crc = 0, 0
    with tempfile.TemporaryFile() as file:
        for content in _inflated(packed, name):
            written, crc = written + len(content), zlib.crc32(content, crc)
            if written > member.size:
                break
            file.write(content)
        if written != member.size or crc != member.crc:
            raise HoldfastError(
                f"{name} is damaged: it does not inflate to the size and checksum that the zip declares"
            )
        file.flush()
        return _mapped(file, name)


def _inflated(packed: Region, name: str) -> Iterator[bytes]:
    """The content of a deflated member in blocks of bounded size, however far a few of its bytes inflate."""
    inflater = zlib.decompressobj(-15)
    written = 0
    try:
        for start in range(0, len(packed.data), BLOCK):
            rest: bytes | memoryview = packed.data[start : start + BLOCK]
            while content := inflater.decompress(rest, BLOCK):
                rest, written = inflater.unconsumed_tail, written + len(content)
                if written > MAX_RATIO * (start + BLOCK):
                    raise HoldfastError(f"{name} inflates more than {MAX_RATIO} times, which weights never do")
                yield content
            packed.drop_pages()
    except zlib.error:
        raise HoldfastError(f"{name} is damaged: it does not inflate") from None
    if not inflater.eof or inflater.unused_data:
        raise HoldfastError(f"{name} is damaged: its compressed data do not end at the size that the zip declares")


def _bad_zip(region: Region, reason: str) -> NoReturn:
    raise HoldfastError(f"{region.name} is not a valid zip: {reason}")
