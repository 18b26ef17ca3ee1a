"""A slot's payload, read from its file to a device and verified there.

Threads read into small page-locked buffers, from which the device copies while they read on: neither mapping the whole slot nor
registering it with CUDA is waited for. The invariant: a payload is returned only if every row sum of the bytes on the device is
the one that was taken from the source.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.checkpoint.layout import ShardLayout
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.checksum import ROW, sum_rows_on_device, sum_tail
from holdfast.snapshot.memory.slot import DamagedError, SlotHeader

CHUNK_BYTES = 8 << 20
THREADS = 10
FREE_SHARE = 0.5
"""of the device's free memory that a payload may take beside the tensors it is loaded into"""


def fits(nbytes: int, device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return nbytes <= FREE_SHARE * free


def read_verified(arena: Arena, index: int, header: SlotHeader, device: torch.device) -> torch.Tensor:
    """The payload of a READY slot, on the device; raises DamagedError for the first tensor that differs from what was copied."""
    slot = arena.slot(index)
    layout, starts, expected = slot.verified_tables(header)
    payload = torch.empty(layout.size, dtype=torch.uint8, device=device)
    _read(arena, index, payload)
    wrong = np.flatnonzero(_row_sums(payload, layout, starts, len(expected)) != expected)
    if len(wrong):
        number = bisect_right(starts, wrong[0]) - 1
        name, at = layout.pieces[number].name, ROW * (int(wrong[0]) - starts[number])
        raise DamagedError(f"{slot.origin}: {name} of step {header.step} is damaged in the 4 KiB from byte {at:,}")
    return payload


def _row_sums(payload: torch.Tensor, layout: ShardLayout, starts: Sequence[int], rows: int) -> NDArray[np.int64]:
    """The row sums of all tensors in a payload, by torch's kernels: a first launch of Triton takes longer than all of them.

    Tensors of whole rows that follow each other are summed at once. Last, partial rows come to the host together.
    """
    found = torch.zeros(rows, dtype=torch.int64, device=payload.device)
    runs: list[list[int]] = []  # first row, begin, end
    tails: list[tuple[int, int, int]] = []  # row, begin, end
    for piece, begin, first in zip(layout.pieces, layout.starts, starts, strict=True):
        end = begin + piece.nbytes
        body = end - piece.nbytes % ROW
        if runs and runs[-1][2] == begin:
            runs[-1][2] = body
        elif body > begin:
            runs.append([first, begin, body])
        if body < end:
            tails.append((first + piece.nbytes // ROW, body, end))
    for first, begin, end in runs:
        sum_rows_on_device(payload[begin:end], found[first:])
    sums = found.cpu().numpy()
    if tails:
        places = np.concatenate([np.arange(begin, end) for _, begin, end in tails])
        content = payload[torch.from_numpy(places).to(payload.device)].cpu().numpy()
        ends = np.cumsum([end - begin for _, begin, end in tails])
        for (row, _, _), part in zip(tails, np.split(content, ends[:-1]), strict=True):
            sums[row] = sum_tail(part)
    return sums


def _read(arena: Arena, index: int, payload: torch.Tensor) -> None:
    size = min(CHUNK_BYTES, len(payload))
    # one allocation: page-locking by each thread for itself takes longer, since it holds up what the others read
    buffers = torch.empty(THREADS, size, dtype=torch.uint8, pin_memory=payload.is_cuda)
    chunks, lock = iter(range(0, len(payload), CHUNK_BYTES)), threading.Lock()

    def read(buffer: torch.Tensor) -> None:
        stream = torch.cuda.Stream(payload.device) if payload.is_cuda else None
        with torch.cuda.stream(stream):
            for begin in _taken(chunks, lock):
                target = payload[begin : begin + CHUNK_BYTES]
                part = buffer[: len(target)]
                arena.read_payload(index, begin, part.numpy().data)
                target.copy_(part, non_blocking=True)
                if stream is not None:
                    stream.synchronize()  # a fraction of the time that reading takes, and the others read meanwhile

    if payload.is_cuda:
        torch.cuda.current_stream(payload.device).synchronize()  # earlier work may still use the payload's memory
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(read, buffers):
            pass


def _taken(chunks: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            begin = next(chunks, None)
        if begin is None:
            return
        yield begin
