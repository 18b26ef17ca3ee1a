"""Parquet: the keys are columns of strings or of lists of strings; a unit is a row group; a row counts as a line."""

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.data.sources import BadLine, DocumentBatch, InputFile, Unit, Value
from holdfast.system.errors import HoldfastError

BATCH_ROWS = 4096


def _open(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise HoldfastError(
            f"{path} is a Parquet file; reading it needs pyarrow: pip install 'holdfast[parquet]'"
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=False, page_checksum_verification=True)
    except (OSError, ValueError) as error:
        raise HoldfastError(f"{path} is a damaged Parquet file: {str(error).splitlines()[0]}") from error


def units(file: InputFile, unit_bytes: int) -> Iterator[Unit]:
    groups = _open(file.path).num_row_groups
    for group in range(groups):
        position, after = file.size * group // groups, file.size * (group + 1) // groups
        yield Unit(file.number, file.path, file.source, "rows", group, group + 1, position, after - position)


def read(unit: Unit, keys: Sequence[str]) -> Iterator[DocumentBatch]:
    file = _open(unit.path)
    missing = [key for key in keys if key not in file.schema_arrow.names]
    if missing:
        columns = ", ".join(file.schema_arrow.names)
        raise HoldfastError(
            f"{unit.path} has no column '{missing[0]}', only {columns}: name the column of the text with --json-keys"
        )
    twice = [key for key in keys if file.schema_arrow.names.count(key) > 1]
    if twice:
        raise HoldfastError(f"{unit.path} has several columns '{twice[0]}': write it again with one of them")
    try:
        for rows in file.iter_batches(BATCH_ROWS, row_groups=[unit.start], columns=list(keys), use_threads=False):
            yield _batch([_values(rows.column(key)) for key in keys], keys, rows.nbytes)
    except (OSError, ValueError, NotImplementedError) as error:  # the last for a damaged number of a type
        raise HoldfastError(f"{unit.path} is a damaged Parquet file: {str(error).splitlines()[0]}") from error


def _values(column: Any) -> list[Any]:
    """The values of a column; in place of one that is not UTF-8 the error."""
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        found = [_value(scalar) for scalar in column]
    return found


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _batch(columns: list[list[Any]], keys: Sequence[str], size: int) -> DocumentBatch:
    rows = len(columns[0])
    if all(set(map(type, column)) <= {str} for column in columns):
        return DocumentBatch(columns, rows, size)
    batch = DocumentBatch([[] for _ in keys], rows, size)
    for row, values in enumerate(zip(*columns, strict=True)):
        wrong = next(((key, value) for key, value in zip(keys, values, strict=True) if not _is_text(value)), None)
        if wrong:
            kind = "UTF-8" if isinstance(wrong[1], UnicodeDecodeError) else "a text"
            batch.bad.append(BadLine(row, 0, f"its '{wrong[0]}' is not {kind}"))
        else:
            for column, value in zip(batch.values, values, strict=True):
                column.append(value)
    return batch


def _is_text(value: Value | Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
