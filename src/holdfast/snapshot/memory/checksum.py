"""The digest of a snapshot: the wrap-around sum of the 64-bit words of every 4 KiB row of a piece; the last row is
padded with zeros.

It is taken from the source while it is copied and compared with the copy later, so it detects a torn copy, a flipped bit, a bad
transfer or a bad memory module, not only a bad disk. It does not depend on the order of words in a row, which none of those
changes; XOR would miss a constant tensor that is half torn. The invariant: both ways of computing it (numpy, torch on a device)
give the same numbers.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.layout import ShardLayout

if TYPE_CHECKING:
    import torch

ROW = 4096
WORDS = ROW // 8


def rows_in(nbytes: int) -> int:
    return -(-nbytes // ROW)


def digest_starts(layout: ShardLayout) -> tuple[list[int], int]:
    """The index of each piece's first row sum, and how many there are."""
    starts, total = [], 0
    for piece in layout.pieces:
        starts.append(total)
        total += rows_in(piece.nbytes)
    return starts, total


def sum_rows(content: NDArray[np.uint8], sums: NDArray[np.int64]) -> None:
    whole = len(content) // ROW
    if whole:
        words = content[: whole * ROW].view(np.int64).reshape(whole, WORDS)
        np.sum(words, axis=1, out=sums[:whole])
    if whole * ROW < len(content):
        sums[whole] = sum_tail(content[whole * ROW :])


def sum_tail(content: NDArray[np.uint8]) -> np.int64:
    padded = np.zeros(-(-len(content) // 8) * 8, dtype=np.uint8)
    padded[: len(content)] = content
    return np.int64(padded.view(np.int64).sum())


def sum_rows_on_device(content: "torch.Tensor", sums: "torch.Tensor") -> None:
    """The same from a flat uint8 tensor on a device, by torch's kernels."""
    import torch

    whole = content.numel() // ROW
    body, tail = content[: whole * ROW], content[whole * ROW :]
    if whole:
        if body.data_ptr() % 8 or body.storage_offset() % 8:
            body = body.clone()
        torch.sum(body.view(torch.int64).view(whole, WORDS), dim=1, out=sums[:whole])
    if len(tail):
        padded = torch.zeros(-(-len(tail) // 8) * 8, dtype=torch.uint8, device=tail.device)
        padded[: len(tail)] = tail
        sums[whole] = padded.view(torch.int64).sum()
