"""Writes planned files: every name, shape and place is known before the first byte, then blocks flow from source to target.

The invariant: memory is a few blocks per worker, whatever the size of the model. Files are written under a temporary folder
that the caller publishes by rename.
"""

import hashlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.conversion.files.torch_writer import TorchLayout, lay_out_torch
from holdfast.conversion.files.zips import Region, check_crc
from holdfast.conversion.model import MappedPages
from holdfast.conversion.tensors import BLOCK_BYTES, Tensor
from holdfast.system.descriptors import pwrite_all
from holdfast.system.progress import progress

DROP_PAGES_EVERY = 32 << 20
_LOCAL = threading.local()
SYNC_EVERY = 64 << 20
"""Bytes between syncs during the conversion, which keep the final sync short."""


@dataclass
class PlannedFile:
    """One output file. `tree` for torch's format (tensors as its leaves), `tensors` for safetensors, `content` for all else."""

    name: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    tree: Any = None
    content: bytes | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    layout: tuple[bytes, dict[str, int]] | None = None
    """A safetensors header made elsewhere, and each tensor's place in the file."""


@dataclass
class WritePlan:
    files: list[PlannedFile]
    notes: list[str] = field(default_factory=list)
    finish: Callable[[Path], None] | None = None
    """Called with the folder when all files are written."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors.values())


@dataclass
class _Target:
    """An open output file and where each tensor goes in it."""

    descriptor: int
    places: dict[str, int]
    torch: TorchLayout | None
    checksums: dict[str, int] = field(default_factory=dict)


def write_plan(
    plan: WritePlan,
    folder: Path,
    regions: Sequence[MappedPages],
    unchecked: Mapping[str, tuple[Region, int]] | None = None,
    hashed: bool = False,
) -> dict[str, dict[str, str]]:
    """Writes all files of the plan, and compares what it reads with `unchecked`; gives sha256 per file and tensor if `hashed`."""
    digests: dict[str, dict[str, str]] = {}
    jobs: list[tuple[_Target, PlannedFile, str]] = []
    targets: list[_Target] = []
    try:
        for file in plan.files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.content is not None:
                path.write_bytes(file.content)
                continue
            target = _open_target(file, path)
            targets.append(target)
            jobs += [(target, file, name) for name in file.tensors]
            digests[file.name] = {}
        _run_jobs(jobs, plan.nbytes, regions, list((unchecked or {}).values()), digests if hashed else None)
        for target in targets:
            if target.torch is not None:
                target.torch.finish(target.descriptor, target.checksums)
    finally:
        for target in targets:
            os.close(target.descriptor)
    if plan.finish is not None:
        plan.finish(folder)
    return digests


def _open_target(file: PlannedFile, path: Path) -> _Target:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    if file.tree is not None:
        layout = lay_out_torch(file.tree, file.tensors, path.stem)
        layout.start(descriptor)
        places = {name: entry.start for name, entry in layout.tensors.items()}
        return _Target(descriptor, places, layout)
    header, places = file.layout or safetensors_header(file.tensors, file.metadata)
    pwrite_all(descriptor, header, 0)
    os.ftruncate(descriptor, len(header) + sum(tensor.nbytes for tensor in file.tensors.values()))
    return _Target(descriptor, places, None)


def safetensors_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header (length included), and each tensor's place in the file."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, offsets = 0, {}
    for name, tensor in tensors.items():
        offsets[name] = at
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + offset for name, offset in offsets.items()}


def _run_jobs(
    jobs: Iterable[tuple[_Target, PlannedFile, str]],
    total: int,
    regions: Sequence[MappedPages],
    unchecked: Sequence[tuple[Region, int]],
    digests: dict[str, dict[str, str]] | None,
) -> None:
    # Large tensors first, so that the workers end together; otherwise in file order.
    ordered = sorted(jobs, key=lambda job: -(job[1].tensors[job[2]].nbytes >> 26))
    workers, done, syncing = min(4, os.cpu_count() or 1), 0, None
    with progress("converting", total) as bar, ThreadPoolExecutor(workers + 1) as pool, ThreadPoolExecutor(1) as syncer:
        checks = [pool.submit(_check_source, *check) for check in unchecked]
        futures = {pool.submit(_write_tensor, *job, regions, digests): job for job in ordered}
        try:
            for future in as_completed([*checks, *futures]):
                bar.advance(future.result())
                done += future.result()
                if done >= SYNC_EVERY and future in futures and (syncing is None or syncing.done()):
                    syncing, done = syncer.submit(os.fdatasync, futures[future][0].descriptor), 0
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _check_source(region: Region, crc: int) -> int:
    check_crc(region, crc)
    return 0  # bytes written


def _write_tensor(
    target: _Target,
    file: PlannedFile,
    name: str,
    regions: Sequence[MappedPages],
    digests: dict[str, dict[str, str]] | None,
) -> int:
    tensor = file.tensors[name]
    at = target.places[name]
    checksum, digest, since = 0, hashlib.sha256(), 0
    for block in tensor.blocks(_scratch()):
        data = np.ascontiguousarray(block).data.cast("B") if block.size else memoryview(b"")
        pwrite_all(target.descriptor, data, at)
        if target.torch is not None:
            checksum = zlib.crc32(data, checksum)
        if digests is not None:
            digest.update(data)
        at += len(data)
        since += len(data)
        if since >= DROP_PAGES_EVERY:
            drop_pages(regions)
            since = 0
    target.checksums[name] = checksum
    if digests is not None:
        digests[file.name][name] = digest.hexdigest()
    if tensor.nbytes >= 1 << 20:
        drop_pages(regions)
    return tensor.nbytes


def _scratch() -> NDArray[np.uint8]:
    """This thread's buffer: fresh memory for every block would cost as much as the copy into it."""
    if not hasattr(_LOCAL, "buffer"):
        _LOCAL.buffer = np.empty(BLOCK_BYTES, np.uint8)
    buffer: NDArray[np.uint8] = _LOCAL.buffer
    return buffer


def drop_pages(regions: Iterable[MappedPages]) -> None:
    for region in regions:
        region.drop_pages()
