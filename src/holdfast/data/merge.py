"""Joining datasets: the tokens one after the other, and the index that a single run would have written.

The invariant: memory does not grow with the data, and nothing is published before every part has been checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.data.append_file import append_file
from holdfast.data.indexed import IndexedDataset, IndexPart, pair_paths, publish_pairs, write_index
from holdfast.system.atomic_files import (
    check_can_write,
    explain_os_error,
    make_folder,
    remove_leftovers,
    temporary_beside,
)
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import progress


@dataclass(frozen=True)
class MergeResult:
    prefix: str
    parts: int
    sequences: int
    documents: int
    bin_bytes: int


def find_parts(names: Sequence[str | Path]) -> list[str]:
    """Prefixes of datasets: those given, and those in the folders given, in the order of their names."""
    found: list[str] = []
    for name in map(Path, names):
        if name.is_dir():
            prefixes = sorted(str(path)[:-4] for path in name.glob("*.idx") if not path.name.startswith("."))
            if not prefixes:
                raise HoldfastError(f"the folder {name} holds no .idx file")
            found += prefixes
        else:
            found.append(str(pair_paths(name)[1])[:-4])
    return found


def merge(inputs: Sequence[str | Path], output_prefix: str | Path, *, overwrite: bool = False) -> MergeResult:
    """Joins the datasets in the given order (folders: order of names) into one."""
    prefixes = find_parts(inputs)
    bin_path, idx_path = pair_paths(output_prefix)
    output = str(bin_path)[:-4]
    prefixes = [prefix for prefix in prefixes if Path(prefix).resolve() != Path(output).resolve()]
    if not prefixes:
        raise HoldfastError(f"the only input is {output}, which is also the output; name other datasets with --input")
    if not overwrite and (bin_path.exists() or idx_path.exists()):
        raise HoldfastError(f"{output}.bin or .idx exists already; choose another --output-prefix or pass --overwrite")
    check_can_write(bin_path)
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    _check_alike(parts)
    make_folder(bin_path.parent, bin_path)
    remove_leftovers(bin_path, idx_path)
    bin_file, idx_file = temporary_beside(bin_path), temporary_beside(idx_path)
    try:
        size = _join_tokens(parts, bin_file)
        index = [IndexPart(part.sequence_lengths, part.document_indices[1:], part.sequence_modes) for part in parts]
        write_index(idx_file, parts[0].dtype, index)
        publish_pairs([(bin_file, idx_file, output)])
    except OSError as error:
        raise explain_os_error(error, bin_path) from error
    finally:
        bin_file.unlink(missing_ok=True)
        idx_file.unlink(missing_ok=True)
    return MergeResult(output, len(parts), sum(map(len, parts)), sum(part.document_count for part in parts), size)


def _check_alike(parts: Sequence[IndexedDataset]) -> None:
    first = parts[0]
    filled = next((part for part in parts if len(part)), first)
    for part in parts:
        if part.dtype != first.dtype:
            raise HoldfastError(
                f"{part.prefix} has tokens of type {part.dtype}, {first.prefix} of type {first.dtype}: "
                "they come from different tokenizers and cannot be merged"
            )
        # An empty part has no sequences, and so neither has modes nor lacks them.
        if len(part) and part.multimodal != filled.multimodal:
            raise HoldfastError(f"{part.prefix} and {filled.prefix}: one has modes and the other has none")
        part.check()
        # New pointers are computed from the lengths: a part must hold its sequences in a row, as every writer leaves them.
        tokens = int(part.sequence_lengths.sum(dtype="int64"))
        if tokens * part.dtype.itemsize != part.bin_path.stat().st_size:
            raise HoldfastError(
                f"{part.bin_path} does not hold exactly the sequences of its index; it cannot be merged"
            )


def _join_tokens(parts: Sequence[IndexedDataset], destination: Path) -> int:
    sizes = [part.bin_path.stat().st_size for part in parts]
    with progress("merge", sum(sizes)) as bar, destination.open("wb", buffering=0) as file:
        for part, size in zip(parts, sizes, strict=True):
            with part.bin_path.open("rb", buffering=0) as source:
                append_file(source.fileno(), file.fileno(), size, bar.advance)
    return sum(sizes)
