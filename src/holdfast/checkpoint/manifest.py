"""MANIFEST.json: what a checkpoint consists of, and the checksum of every byte of it. No torch.

The invariant: a manifest is written when all it speaks of is on disk, and it covers itself: a flipped bit in it is
noticed as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from holdfast.checkpoint.layout import Layout, Piece
from holdfast.errors import HoldfastError

FILE_NAME = "MANIFEST.json"
FORMAT = 1
CHUNK = 16 << 20


@dataclass(frozen=True)
class ShardFile:
    """A file of the checkpoint: the xxh3_64 of each 16 MiB of it, and the pieces in it with their byte positions."""

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


def describe_shard(layout: Layout, rank: int, world: int, chunks: list[str]) -> ShardFile:
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
    """The checksums of a whole shard's chunks; xxhash lets go of the interpreter lock, so threads help."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda span: chunk_checksum(content[span[0] : span[1]]), chunk_ranges(len(content))))


def encode(manifest: Manifest) -> bytes:
    record = asdict(manifest)
    return orjson.dumps({"checksum": _checksum(record), **record}, option=orjson.OPT_INDENT_2)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / FILE_NAME).write_bytes(encode(manifest))


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of a checkpoint folder. An absent or damaged one is a HoldfastError that names it."""
    file = Path(path) / FILE_NAME
    if not file.is_file():
        raise HoldfastError(f"{path} is not a complete checkpoint: it has no {FILE_NAME}")
    try:
        record = orjson.loads(file.read_bytes())
        checksum = record.pop("checksum")
    except OSError as error:
        raise HoldfastError(f"{file} cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise HoldfastError(f"{file} is damaged: not a manifest ({error})") from error
    if not isinstance(record, dict) or checksum != _checksum(record):
        raise HoldfastError(f"{file} is damaged: its checksum does not match its content")
    if record.get("format") != FORMAT:
        raise HoldfastError(f"{file} has format {record.get('format')}; this version of Holdfast reads format {FORMAT}")
    record["files"] = [ShardFile(**entry) for entry in record["files"]]
    return Manifest(**record)


def pieces_of(manifest: Manifest, file: ShardFile) -> Iterator[tuple[Piece, int]]:
    for name, start, offset, shape in file.pieces:
        dtype, global_shape = manifest.tensors[name]
        yield Piece(name, dtype, tuple(global_shape), tuple(offset), tuple(shape)), start


def _checksum(record: Mapping[str, Any]) -> str:
    return chunk_checksum(orjson.dumps(record, option=orjson.OPT_SORT_KEYS))


def merge_settings(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One entry per distinct optimizer setting, with all parameters that it holds for on any rank."""
    merged: list[dict[str, Any]] = []
    for entries in everyone:
        for entry in entries:
            home = next((known for known in merged if known["settings"] == entry["settings"]), None)
            if home is None:
                home = {
                    "parameters": [],
                    "settings": entry["settings"],
                    "numbers": {},
                    "exact": entry.get("exact", False),
                }
                merged.append(home)
            known_names = set(home["parameters"])
            home["parameters"] += [name for name in entry["parameters"] if name not in known_names]
            home["numbers"].update(entry["numbers"])
    return merged
