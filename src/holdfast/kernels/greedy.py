"""The index of the largest value of each row: the likeliest token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _largest_of_blocks(x, stride, values, indices, columns, BLOCK: tl.constexpr):
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    largest, index = tl.max(value, 0, return_indices=True)
    tl.store(values + row * blocks + block, largest)
    tl.store(indices + row * blocks + block, block * BLOCK + index)


@triton.jit
def _largest_of_rows(values, indices, out, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    value = tl.load(values + row * blocks + block, mask=block < blocks, other=float("-inf"))
    largest = tl.max(value, 0, return_indices=True)[1]
    tl.store(out + row, tl.load(indices + row * blocks + largest).to(tl.int64))


def argmax(x: Tensor) -> Tensor:
    """int64 index of the largest value of each row of (rows, columns), the first of equal ones."""
    rows, columns = x.shape
    blocks = triton.cdiv(columns, BLOCK)
    values = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    indices = torch.empty(rows, blocks, dtype=torch.int32, device=x.device)
    out = torch.empty(rows, dtype=torch.int64, device=x.device)
    _largest_of_blocks[(rows, blocks)](x, x.stride(0), values, indices, columns, BLOCK, num_warps=4)
    _largest_of_rows[(rows,)](values, indices, out, blocks, triton.next_power_of_2(blocks), num_warps=4)
    return out
