"""MANIFEST.json: what a checkpoint consists of, and the checksum of every byte of it. No torch.

The invariant: a manifest is written when all files that it lists are on disk, and its checksum covers itself: a flipped bit in
it is detected as well.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from holdfast.checkpoint.layout import ITEM_SIZES, ShardLayout, TensorSlice
from holdfast.system.bounded_files import count_json_values, read_bounded
from holdfast.system.errors import HoldfastError

FILE_NAME = "MANIFEST.json"
FORMAT = 1
CHUNK = 16 << 20
MAX_BYTES = 1 << 30
MAX_UNTRUSTED_BYTES = 64 << 20
MAX_UNTRUSTED_VALUES = 3_000_000
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class ShardFile:
    """A file of the checkpoint: the xxh3_64 of each 16 MiB of it, and its tensor slices with their byte positions."""

    name: str
    rank: int
    bytes: int
    chunks: list[str]
    pieces: list[tuple[str, int, list[int], list[int]]]
    """name, first byte, offset in the whole tensor, shape"""


@dataclass(frozen=True)
class Manifest:
    step: int
    world: int
    plan_hash: str
    tensors: dict[str, tuple[str, list[int]]]
    """name → dtype, global shape"""
    files: list[ShardFile]
    layout: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    per_rank: list[dict[str, Any]] = field(default_factory=list)
    optimizer_settings: list[dict[str, Any]] = field(default_factory=list)
    padded_rows: dict[str, int] = field(default_factory=dict)
    source: str = "training"
    """training: written by the ranks; memory: written from a memory snapshot"""
    format: int = FORMAT


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def describe_shard(layout: ShardLayout, rank: int, world: int, chunks: list[str]) -> ShardFile:
    pieces = [
        (piece.name, start, list(piece.offset), list(piece.shape))
        for piece, start in zip(layout.pieces, layout.starts, strict=True)
    ]
    return ShardFile(shard_name(rank, world), rank, layout.size, chunks, pieces)


def chunk_checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def chunk_ranges(size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, CHUNK):
        yield begin, min(begin + CHUNK, size)


def checksum_chunks(content: memoryview, threads: int = 1) -> list[str]:
    """The checksums of a whole shard's chunks; xxhash releases the interpreter lock, so threads help."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda span: chunk_checksum(content[span[0] : span[1]]), chunk_ranges(len(content))))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    record = asdict(manifest)
    content = orjson.dumps({"checksum": _checksum(record), **record}, option=orjson.OPT_INDENT_2)
    (folder / FILE_NAME).write_bytes(content)


def read_manifest(path: Path | str, *, untrusted: bool = False) -> Manifest:
    """The manifest of a checkpoint folder; HoldfastError with its name if it is absent, damaged or forged.

    `untrusted`: the folder may be forged, so the manifest must not be larger than that of a large run.
    """
    file = Path(path) / FILE_NAME
    if not file.is_file():
        raise HoldfastError(f"{path} is not a complete checkpoint: it has no {FILE_NAME}")
    try:
        content = read_bounded(file, MAX_UNTRUSTED_BYTES if untrusted else MAX_BYTES, "manifest")
        if untrusted and count_json_values(content) > MAX_UNTRUSTED_VALUES:
            raise HoldfastError(f"{file} has more than {MAX_UNTRUSTED_VALUES:,} values")
        record = orjson.loads(content)
        checksum = record.pop("checksum")
    except OSError as error:
        raise HoldfastError(f"{file} cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise HoldfastError(f"{file} is damaged: not a manifest ({error})") from error
    if not isinstance(record, dict) or checksum != _checksum(record):
        raise HoldfastError(f"{file} is damaged: its checksum does not match its content")
    if record.get("format") != FORMAT:
        raise HoldfastError(f"{file} has format {record.get('format')}; this version of Holdfast reads format {FORMAT}")
    try:
        return check_manifest(record)
    except (ValueError, TypeError, KeyError) as error:
        raise HoldfastError(f"{file} is forged or damaged: {error}") from None


def check_manifest(record: dict[str, Any]) -> Manifest:
    """The manifest that a record describes; ValueError, TypeError or KeyError if it contradicts itself or leaves its folder."""
    kinds: dict[str, type] = {
        "step": int, "world": int, "plan_hash": str, "tensors": dict, "files": list, "layout": dict, "shared": dict,
        "per_rank": list, "optimizer_settings": list, "padded_rows": dict, "source": str,
    }  # fmt: skip
    for name, kind in kinds.items():
        _require(type(record.get(name, kind())) is kind, f"{name} is not of type {kind.__name__}")
    for name in ("per_rank", "optimizer_settings"):
        _require(all(type(entry) is dict for entry in record.get(name, [])), f"{name} is not a list of objects")
    _require(all(_is_size(rows) for rows in record.get("padded_rows", {}).values()), "padded_rows are not numbers")
    _require(0 <= record["step"] < 1 << 50 and 0 < record["world"] < 1 << 24, "step or world is out of range")
    for name, (dtype, shape) in record["tensors"].items():
        known = isinstance(dtype, str) and dtype in ITEM_SIZES
        _require(known and _is_shape(shape), f"the type or shape of {name} is unknown")
    record["files"] = [ShardFile(**entry) for entry in record["files"]]
    manifest = Manifest(**record)
    _require(len({file.name for file in manifest.files}) == len(manifest.files), "two files have one name")
    for file in manifest.files:
        _check_file(manifest, file)
    return manifest


def _check_file(manifest: Manifest, file: ShardFile) -> None:
    valid = isinstance(file.name, str) and _FILE_NAME.fullmatch(file.name) is not None
    _require(valid, f"{str(file.name)[:200]!r} is not the name of a file in this folder")
    _require(_is_size(file.rank) and file.rank < manifest.world, f"{file.name} has a rank that does not exist")
    _require(_is_size(file.bytes) and isinstance(file.chunks, list), f"the size of {file.name} is not valid")
    _require(all(isinstance(chunk, str) for chunk in file.chunks), f"a checksum of {file.name} is not text")
    _require(len(file.chunks) == -(-file.bytes // CHUNK), f"{file.name} has too many or too few checksums")
    for name, start, offset, shape in file.pieces:
        dtype, whole = manifest.tensors[name]
        _require(_is_shape(offset) and _is_shape(shape) and _is_size(start), f"a piece of {name} has no valid position")
        _require(
            len(offset) == len(shape) == len(whole),
            f"a piece of {name} has another number of dimensions than the tensor",
        )
        inside = all(first + size <= end for first, size, end in zip(offset, shape, whole, strict=True))
        _require(inside, f"a piece of {name} is outside the tensor")
        _require(
            start + math.prod(shape) * ITEM_SIZES[dtype] <= file.bytes, f"a piece of {name} is outside {file.name}"
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 50


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 16 and all(_is_size(size) for size in value)


def pieces_of(manifest: Manifest, file: ShardFile) -> Iterator[tuple[TensorSlice, int]]:
    for name, start, offset, shape in file.pieces:
        dtype, global_shape = manifest.tensors[name]
        yield TensorSlice(name, dtype, tuple(global_shape), tuple(offset), tuple(shape)), start


def _checksum(record: Mapping[str, Any]) -> str:
    return chunk_checksum(orjson.dumps(record, option=orjson.OPT_SORT_KEYS))


def merge_settings(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One entry per distinct optimizer setting, with all parameters that have it on any rank."""
    merged: list[dict[str, Any]] = []
    for entries in everyone:
        for entry in entries:
            group = next((known for known in merged if known["settings"] == entry["settings"]), None)
            if group is None:
                exact = entry.get("exact", False)
                group = {"parameters": [], "settings": entry["settings"], "numbers": {}, "exact": exact}
                merged.append(group)
            known_names = set(group["parameters"])
            group["parameters"] += [name for name in entry["parameters"] if name not in known_names]
            group["numbers"].update(entry["numbers"])
    return merged
