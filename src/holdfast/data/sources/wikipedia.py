"""Wikipedia's `pages-articles` dump: XML of pages, compressed as bz2 in many streams, read by all workers at once.

A unit owns the pages that begin in it, wherever its cuts fall, and reads on for the end of the last one. Articles are documents;
redirects, other namespaces and pages other than wikitext are left out. The keys are `text` (without markup), `title` and `id`. A
page counts as a line. The invariant: what can be decoded is read, and what cannot is reported as bad where its stream begins.
"""

import bz2
import html
import itertools
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.data.sources import BadLine, DocumentBatch, InputFile, Unit, Value
from holdfast.data.sources.compressed import BZ2_STREAM, bz2_streams, open_stream, sniff
from holdfast.data.sources.prefetch import fed_units
from holdfast.data.sources.wikitext import DROPPED_NAMESPACES, plain_text
from holdfast.system.errors import HoldfastError, UsageError

KEYS = ("text", "title", "id")
READ_BYTES = 1 << 16
BATCH_BYTES = 1 << 20
# A dump begins with the names of its namespaces: File and Category have these numbers.
FILE_AND_CATEGORY = (b"6", b"14")
HEADER_BYTES = 1 << 16

PAGE, PAGE_END = b"<page>", b"</page>"
_TITLE, _NAMESPACE = re.compile(rb"<title>([^<]*)</title>"), re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
_ID, _MODEL = re.compile(rb"<id>\s*(\d+)\s*</id>"), re.compile(rb"<model>([^<]*)</model>")
_TEXT = re.compile(rb"<text\b[^>]*>([^<]*)</text>")
_NAMED = re.compile(rb'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>')
_REDIRECT = re.compile(r"\s*#REDIRECT\b", re.IGNORECASE)


@dataclass(frozen=True)
class DamagedStream:
    """Compressed bytes that cannot be decoded."""

    position: int
    reason: str


def units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    if file.compression == "bz2" and _is_multistream(file):
        # Markup compresses to a quarter or less.
        yield from _cut(file, bz2_streams(file.path), unit_bytes // 4, "streams")
    elif file.compression:
        yield from fed_units(file, unit_bytes, (PAGE_END,))
    else:
        yield from _cut(file, iter(range(0, file.size, unit_bytes)), unit_bytes, "range")


def _is_multistream(file: InputFile) -> bool:
    return len(list(itertools.islice(bz2_streams(file.path), 2))) == 2


def _cut(file: InputFile, starts: Iterator[int], least: int, how: str) -> Iterator[Unit]:
    begin = 0
    for start in starts:
        if start - begin >= least:
            yield Unit(file.number, file.path, file.source, how, begin, start, begin, start - begin)
            begin = start
    if file.size > begin:
        yield Unit(file.number, file.path, file.source, how, begin, file.size, begin, file.size - begin)


def read(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    unknown = [key for key in keys if key not in KEYS]
    if unknown:
        raise UsageError(
            f"{unit.path} is a Wikipedia dump; its pages have no '{unknown[0]}', only {', '.join(KEYS)}: "
            "name one of these with --json-keys"
        )
    namespaces = dropped_namespaces(unit.path)
    batch = DocumentBatch([[] for _ in keys], 0, 0)
    content: list[bytes] = []
    for item in _pages(unit):
        if isinstance(item, DamagedStream):
            batch.bad.append(BadLine(batch.lines, batch.size, item.reason))
            continue
        batch.lines += 1
        batch.size += len(item)
        content.append(item)
        article = parse_page(item, namespaces)
        if article is not None:
            for column, key in zip(batch.values, keys, strict=True):
                column.append(article[key])
        if batch.size >= BATCH_BYTES:
            batch.content = b"".join(content)
            yield batch
            batch, content = DocumentBatch([[] for _ in keys], 0, 0), []
    batch.content = b"".join(content)
    yield batch


def parse_page(page: bytes, namespaces: frozenset[str] = DROPPED_NAMESPACES) -> dict[str, Value] | None:
    """Title, id and text of an article; None where the page is not an article or has no text of its own."""
    namespace, model = _NAMESPACE.search(page), _MODEL.search(page)
    title, number, texts = _TITLE.search(page), _ID.search(page), _TEXT.findall(page)
    if (namespace and namespace[1] != b"0") or (model and model[1] != b"wikitext"):
        return None
    if not texts or title is None or b"<redirect " in page:
        return None
    # Of several revisions the last one is the page.
    markup = _unescaped(texts[-1])
    if _REDIRECT.match(markup):
        return None
    text = plain_text(markup, namespaces)
    if not text:
        return None
    return {"text": text, "title": _unescaped(title[1]), "id": number[1].decode() if number else ""}


def _unescaped(text: bytes) -> str:
    return html.unescape(text.decode("utf-8", "replace"))


@lru_cache(maxsize=8)
def dropped_namespaces(path: str) -> frozenset[str]:
    """The namespaces of images and categories in the dump's language, lower case."""
    head = b""
    with open(path, "rb") as file:
        compression = sniff(os.pread(file.fileno(), 8, 0))
        try:
            for piece in open_stream(file, compression, path):
                head += piece
                if b"</siteinfo>" in head or len(head) > HEADER_BYTES:
                    break
        except HoldfastError:
            pass  # a damaged beginning is reported by the unit that owns it
    named = {_unescaped(name).lower() for key, name in _NAMED.findall(head) if key in FILE_AND_CATEGORY}
    return DROPPED_NAMESPACES | named


def _pages(unit: Unit) -> Iterator[bytes | DamagedStream]:
    """The pages that begin in the unit, each from <page> to </page>, and the damaged streams among them."""
    held = b""
    for piece in _own_pieces(unit):
        if isinstance(piece, DamagedStream):
            # The page that was being read has no end any more.
            held = b""
            yield piece
            continue
        held += piece
        if PAGE_END in piece or PAGE_END in held[-len(piece) - len(PAGE_END) :]:
            at = 0
            while (begin := held.find(PAGE, at)) >= 0 and (end := held.find(PAGE_END, begin)) >= 0:
                at = end + len(PAGE_END)
                yield held[begin:at]
            held = held[at:]
    begin = held.find(PAGE)
    if begin < 0:
        begin = next((len(held) - n for n in range(len(PAGE) - 1, 0, -1) if held.endswith(PAGE[:n])), -1)
    if begin >= 0 and unit.how != "fed":
        last = _read_on(unit, held[begin:])
        if last is not None:
            yield last


def _read_on(unit: Unit, page: bytes) -> bytes | None:
    """The rest of a page that begins in this unit; None if it cannot be read, or is not a page."""
    for piece in _later_pieces(unit):
        if isinstance(piece, DamagedStream):
            return None  # reported by the unit that owns the stream
        page += piece
        if not page.startswith(PAGE[: len(page)]):
            return None
        if (end := page.find(PAGE_END, max(0, len(page) - len(piece) - len(PAGE_END)))) >= 0:
            return page[: end + len(PAGE_END)]
    return None


def _own_pieces(unit: Unit) -> Iterator[bytes | DamagedStream]:
    return iter([unit.data]) if unit.how == "fed" else _pieces_between(unit, unit.start, unit.end)


def _later_pieces(unit: Unit) -> Iterator[bytes | DamagedStream]:
    return _pieces_between(unit, unit.end, os.stat(unit.path).st_size)


def _pieces_between(unit: Unit, start: int, end: int) -> Iterator[bytes | DamagedStream]:
    if unit.how == "range":
        return _read_range(unit.path, start, end)
    return _decode_streams(unit.path, start, end)


def _read_range(path: str, start: int, end: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (piece := file.read(min(BATCH_BYTES, end - start))):
            start += len(piece)
            yield piece


def _decode_streams(path: str, start: int, end: int) -> Iterator[bytes | DamagedStream]:
    """What the streams in these bytes hold; one that is damaged does not keep the next from being read."""
    if start >= end:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = start
        while begin < end:
            following = BZ2_STREAM.search(content, begin + 1, end)
            stop = following.start() if following else end
            yield from _decode_stream(content, begin, stop)
            begin = stop


def _decode_stream(content: mmap.mmap, begin: int, end: int) -> Iterator[bytes | DamagedStream]:
    decoder, at = bz2.BZ2Decompressor(), begin
    while at < end:
        if decoder.eof:
            # A stream without blocks has no mark that the search would find.
            decoder, begin = bz2.BZ2Decompressor(), at
        piece = content[at : min(at + READ_BYTES, end)]
        try:
            decoded = decoder.decompress(piece)
        except OSError:
            reason = f"the bz2 stream at byte {begin:,} is damaged near byte {at:,}; its pages from there on are lost"
            yield DamagedStream(begin, reason)
            return
        at += len(piece) - len(decoder.unused_data)
        if decoded:
            yield decoded
    if not decoder.eof:
        reason = (
            f"the bz2 stream at byte {begin:,} ends in the middle at byte {end:,}; its pages from there on are lost"
        )
        yield DamagedStream(begin, reason)
