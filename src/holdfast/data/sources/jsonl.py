"""JSON lines to the values of their keys, by Megatron's rules, with every line that breaks them named.

The invariant: each line is a document, a bad line with a reason, or blank; the three add up to the lines read.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from holdfast.data.sources import BadLine, DocumentBatch, InputFile, Unit, Value
from holdfast.data.sources.lines import line_units, unit_lines

UTF8_BOM = b"\xef\xbb\xbf"
BEGINNING_BYTES = 64 << 10
LONG_LINE_BYTES = 1 << 10
SHOWN_KEYS, SHOWN_KEY_CHARACTERS = 8, 40


def units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    return line_units(file, unit_bytes)


def read(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    for block in unit_lines(unit):
        batch = parse_lines(block, keys)
        batch.content = block
        yield batch


def parse_lines(data: bytes, keys: Sequence[str]) -> DocumentBatch:
    """The documents of whole lines. Blank lines are passed over; Megatron hangs on them."""
    loads = orjson.loads
    lines = _lines(data)
    try:
        if len(keys) == 1:
            key = keys[0]
            values: list[list[Any]] = [[loads(line)[key] for line in lines]]
        else:
            records = [loads(line) for line in lines]
            values = [[record[key] for record in records] for key in keys]
        # One pass at C speed: only strings, which is nearly every corpus.
        if all(set(map(type, column)) <= {str} for column in values):
            return DocumentBatch(values, len(values[0]), len(data))
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    return _parse_carefully(_split(data), keys, len(data))


def _lines(data: bytes) -> Iterable[bytes | memoryview]:
    """The lines; long ones without a copy of each, which costs more than it saves where they are short."""
    beginning = min(len(data), BEGINNING_BYTES)
    if data.count(b"\n", 0, beginning) * LONG_LINE_BYTES > beginning:
        return _split(data)
    return _views(data)


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _views(data: bytes) -> Iterator[memoryview]:
    view, start = memoryview(data), 0
    while (end := data.find(b"\n", start)) >= 0:
        yield view[start:end]
        start = end + 1
    if start < len(data):
        yield view[start:]


def _parse_carefully(lines: Sequence[bytes], keys: Sequence[str], size: int) -> DocumentBatch:
    """Line by line, after something in the batch was not a plain document."""
    batch = DocumentBatch([[] for _ in keys], len(lines), size)
    offset = 0
    for number, line in enumerate(lines):
        if line.strip():
            try:
                for column, value in zip(batch.values, parse_line(line, keys), strict=True):
                    column.append(value)
            except ValueError as error:
                batch.bad.append(BadLine(number, offset, str(error)))
        offset += len(line) + 1
    return batch


def parse_line(line: bytes, keys: Sequence[str]) -> list[Value]:
    """The values of one line's keys; ValueError gives the reason why the line is not a document."""
    record = _load(line)
    if not isinstance(record, dict):
        raise ValueError(f"it is {_named(record)}, not an object with the key '{keys[0]}'")
    values = []
    for key in keys:
        if key not in record:
            raise ValueError(_missing_key(key, record))
        value = record[key]
        strings = value if isinstance(value, list) else [value]
        for string in strings:
            if not isinstance(string, str):
                raise ValueError(f"its '{key}' is {_named(string)}, not a text")
            _check_encodable(string, key)
        values.append(value)
    return values


def _missing_key(key: str, record: dict[str, Any]) -> str:
    """Names the keys that are there; the one with the longest text is most likely the one that is meant."""
    if not record:
        return f"it has no key '{key}': the object is empty"
    shown = [name if len(name) <= SHOWN_KEY_CHARACTERS else name[:SHOWN_KEY_CHARACTERS] + "..." for name in record]
    more = f" and {len(shown) - SHOWN_KEYS} more" if len(shown) > SHOWN_KEYS else ""
    texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
    example = f", for example --json-keys {shlex.quote(max(texts, key=lambda name: texts[name]))}" if texts else ""
    return f"it has no key '{key}', only {', '.join(shown[:SHOWN_KEYS])}{more}: name the key with --json-keys{example}"


def _load(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    if line.startswith(UTF8_BOM):
        raise ValueError("it begins with a byte order mark; remove the first three bytes of the file")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is not UTF-8 ({error.reason})") from error
    try:
        # json takes what Megatron takes and orjson does not: NaN, Infinity, huge integers.
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _check_encodable(string: str, key: str) -> None:
    try:
        string.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"its '{key}' holds half of a surrogate pair at character {error.start}") from error


def _named(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names[type(value)]
