"""Grids of kernels over rows and columns: programs, warps, tile sizes."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

CPU_PROCESSORS = 2  # Triton's interpreter, in tests


@triton.jit
def raise_to(amax, value):
    """Raises the number at `amax` to `value`. Most programs only read it: atomic operations on one address are serialised."""
    if value > tl.load(amax):
        tl.atomic_max(amax, value)


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return 96 << 10
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 << 10))


def column_programs(rows: int, column_blocks: int, per_processor: int, device: torch.device) -> int:
    """Programs that share the rows of one block of columns, so that all blocks together fill the device."""
    return max(1, min(rows, processors(device) * per_processor // column_blocks))


def flat_rows(x: Tensor) -> Tensor:
    """(tokens, columns), contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def warps_of(block: int) -> int:
    """Eight elements or more per thread."""
    return max(1, min(16, block // 256))
