"""Recognises a file that is not JSON lines by its first bytes, and gives the command that makes JSON lines or text of it."""

import csv
import re
import shlex
from pathlib import Path

from holdfast.data.sources.compressed import open_stream, sniff
from holdfast.system.errors import HoldfastError

HEAD_BYTES = 1 << 16
FEWEST_BYTES = 8
BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
ARCHIVES = {b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf": "a 7z archive", b"%PDF-": "a PDF file"}
TAR_MAGIC, TAR_MAGIC_OFFSET = b"ustar", 257

DECOMPRESSORS = {"gz": "gzip -dc", "xz": "xz -dc", "zst": "zstd -dc", "bz2": "bzip2 -dc"}

_COLUMN = re.compile(r"[\w.:/-]{1,64}(?: [\w.:/-]{1,64}){0,3}")
_SPREAD_OBJECT = re.compile(rb"\s*{\s*(?:[^\n]*[,{\[:])?[ \t\r]*\n")
_CSV_TO_JSON = (
    'python3 -c "import csv, json, sys; csv.field_size_limit(1 << 30); '
    '[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{dialect})]"'
)


def wrong_format(path: str) -> str:
    """What the file is instead of JSON lines, and what to do; empty where that is not recognised."""
    if path == "-":
        return ""
    try:
        head = _first_bytes(path)
    except (OSError, HoldfastError):
        return ""
    known = wrong_encoding(head, path) or _archive(head) or _not_a_line(head, path) or _table(head, path)
    return known or _not_compressed(path) or _prose(head)


def _first_bytes(path: str) -> bytes:
    """The first bytes of the file, decompressed."""
    head = b""
    with open(path, "rb") as file:
        for piece in open_stream(file, sniff(file.peek(FEWEST_BYTES)[:FEWEST_BYTES]), path):
            head += piece
            if len(head) >= HEAD_BYTES:
                break
    return head[:HEAD_BYTES]


def wrong_encoding(head: bytes, path: str) -> str:
    """UTF-16 and UTF-32, with a byte order mark or without."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if head.startswith(mark)), "")
    if not encoding and len(head) >= FEWEST_BYTES:
        # Without a mark: of text in a Latin script, every second byte is zero.
        zeros = [head[half::2].count(0) * 2 / len(head) for half in (0, 1)]
        if max(zeros) > 0.7 and min(zeros) < 0.3:
            encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
    if not encoding:
        return ""
    return f"the file is {encoding} and must be UTF-8: {_convert(f'iconv -f {encoding} -t UTF-8', path, '.utf8')}"


def _archive(head: bytes) -> str:
    kind = next((name for start, name in ARCHIVES.items() if head.startswith(start)), "")
    if head[TAR_MAGIC_OFFSET:].startswith(TAR_MAGIC):
        kind = "a tar archive"
    return f"the file is {kind}: unpack it and pass the text files in it" if kind else ""


def _not_a_line(head: bytes, path: str) -> str:
    """JSON that is right, but not one object per line."""
    start = head.lstrip()
    if start.startswith(b"["):
        line, _, rest = start.partition(b"\n")
        if line.rstrip().endswith(b"]") and rest.strip():
            return ""  # an array per line
        return f"the file is one JSON array and must be an object per line: {_convert('jq -c .[]', path, '.lines')}"
    if _SPREAD_OBJECT.match(head):
        return f"its JSON is spread over several lines and must be an object per line: {_convert('jq -c .', path, '.lines')}"
    return ""


def _table(head: bytes, path: str) -> str:
    """CSV and TSV: by the name, or by two lines of as many columns, the first of them names."""
    lines = head.decode("utf-8", "replace").splitlines()[:2]
    if not lines:
        return ""
    named = {".csv": ",", ".tsv": "\t"}.get(Path(path).suffix.lower())
    delimiter = named or max(",\t;", key=lines[0].count)
    columns, *second = csv.reader(lines, delimiter=delimiter)
    alike = len(columns) > 1 and all(map(_COLUMN.fullmatch, columns)) and second and len(second[0]) == len(columns)
    if not named and not alike:
        return ""
    command = _CSV_TO_JSON.format(dialect="" if delimiter == "," else f", delimiter={delimiter!r}")
    kind = "TSV" if delimiter == "\t" else "CSV"
    return (
        f"the file is {kind} with the columns {', '.join(columns)} and must be JSON lines: {_convert(command, path, '')}, "
        "then --json-keys COLUMN"
    )


def _not_compressed(path: str) -> str:
    suffix = Path(path).suffix
    with open(path, "rb") as file:
        if suffix.removeprefix(".") not in DECOMPRESSORS or sniff(file.read(FEWEST_BYTES)):
            return ""
    return f"its name ends in {suffix}, but its content is not compressed: was it downloaded or written whole?"


def _prose(head: bytes) -> str:
    if head.lstrip()[:1] in (b"{", b"[", b'"', b"\xef", b""):
        return ""
    return "a file of plain text needs a name that ends in .txt; otherwise fix the line, or pass --on-bad-line skip"


def _convert(command: str, path: str, addition: str) -> str:
    """The shell command that writes the converted file beside this one."""
    with open(path, "rb") as file:
        compression = sniff(file.read(FEWEST_BYTES))
    name = Path(path).name.removesuffix(f".{compression}")
    stem, dot, suffix = name.rpartition(".")
    target = (
        f"{stem or suffix}{addition}{f'.{suffix}' if dot and suffix in ('jsonl', 'ndjson', 'txt', 'xml') else '.jsonl'}"
    )
    source, written = shlex.quote(path), shlex.quote(str(Path(path).with_name(target)))
    if compression:
        return f"{DECOMPRESSORS[compression]} {source} | {command} > {written}"
    return f"{command} < {source} > {written}"
