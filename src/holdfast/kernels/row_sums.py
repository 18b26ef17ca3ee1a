"""The row sums of many tensors in one launch: the wrap-around sum of the 64-bit words of every 4 KiB of each tensor.

The kernel finds its tensors through a table of addresses. A tensor's last row counts as padded with zeros.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW = 4096
ROWS, WARPS = 4, 4


@triton.jit
def _sum_rows(table, blocks, sums, ROWS: tl.constexpr, ROW: tl.constexpr):
    tensor, first = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    address, size, start = tl.load(table + 3 * tensor), tl.load(table + 3 * tensor + 1), tl.load(table + 3 * tensor + 2)
    if (first + ROWS) * ROW <= size and address % 16 == 0:
        words = tl.multiple_of(address, 16).to(tl.pointer_type(tl.int64)) + first * (ROW // 8)
        at = tl.arange(0, ROWS)[:, None] * (ROW // 8) + tl.arange(0, ROW // 8)[None, :]
        tl.store(sums + start + first + tl.arange(0, ROWS), tl.sum(tl.load(words + at), axis=1))
    else:
        content = address.to(tl.pointer_type(tl.uint8))
        for row in range(first, tl.minimum(first + ROWS, (size + ROW - 1) // ROW)):
            place = tl.arange(0, ROW)
            inside = row * ROW + place < size
            part = tl.load(content + row * ROW + place, mask=inside, other=0).to(tl.int64)
            tl.store(sums + start + row, tl.sum(part << (place % 8 * 8).to(tl.int64)))


class RowSums:
    """Sums the rows of `tensors`, which stay where they are. `starts`: the index of each tensor's first sum in the result."""

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
        device = tensors[0].device
        table = [[t.data_ptr(), t.nbytes, start] for t, start in zip(tensors, starts, strict=True)]
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        counts = torch.tensor([-(-t.nbytes // (ROW * ROWS)) for t in tensors])
        blocks = torch.arange(int(counts.sum()))
        owner = torch.repeat_interleave(torch.arange(len(tensors)), counts)
        first = (blocks - (counts.cumsum(0) - counts)[owner]) * ROWS
        self._blocks = torch.stack([owner, first], dim=1).contiguous().to(device)

    def into(self, sums: Tensor) -> None:
        """Launches the kernel on the current stream."""
        _sum_rows[(len(self._blocks),)](self._table, self._blocks, sums, ROWS, ROW, num_warps=WARPS)
