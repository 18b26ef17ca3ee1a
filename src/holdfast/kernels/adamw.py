"""AdamW over all parameters in two launches. The first one decides the numbers of the step: whether it is skipped, the divisor
that unscales and clips, the bias corrections. The second one updates: decay, moments, the fp32 weight, and its copy in the
compute type.

The kernel finds its tensors through a table of addresses, so parameters, gradients and moments stay separate tensors. The host
waits for nothing and does little: the device has no other work while the step is prepared.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4
WORDS = 6
"""Of a table row: addresses of parameter, gradient, both moments and the copy (0: none), and the number of elements."""


@triton.jit
def _addresses(row, word, at, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block of the tensor that `word` of the table row points to. The hints let 16 bytes be moved at a time."""
    return tl.max_contiguous(tl.multiple_of(tl.load(row + word).to(tl.pointer_type(TYPE)) + at, 16), BLOCK)


@triton.jit
def _update(
    row, start, size, decay, numbers, lr, beta1, beta2, eps,
    COPY: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    parameter, gradient = _addresses(row, 0, at, tl.float32, BLOCK), _addresses(row, 1, at, tl.float32, BLOCK)
    first, second = _addresses(row, 2, at, tl.float32, BLOCK), _addresses(row, 3, at, tl.float32, BLOCK)
    if MASKED:
        g = tl.load(gradient, mask=inside, other=0.0)
        p = tl.load(parameter, mask=inside, other=0.0)
        m = tl.load(first, mask=inside, other=0.0)
        v = tl.load(second, mask=inside, other=0.0)
    else:
        g, p, m, v = tl.load(gradient), tl.load(parameter), tl.load(first), tl.load(second)
    g /= tl.load(numbers + 1)
    p *= 1.0 - lr * decay
    m += (1.0 - beta1) * (g - m)
    v = v * beta2 + (1.0 - beta2) * g * g
    p -= lr / tl.load(numbers + 2) * m / (tl.sqrt(v) / tl.sqrt(tl.load(numbers + 3)) + eps)
    copy = tl.load(row + 4)
    if MASKED:
        tl.store(parameter, p, mask=inside)
        tl.store(first, m, mask=inside)
        tl.store(second, v, mask=inside)
        if copy != 0:
            tl.store(_addresses(row, 4, at, COPY, BLOCK), p.to(COPY), mask=inside)
    else:
        tl.store(parameter, p)
        tl.store(first, m)
        tl.store(second, v)
        if copy != 0:
            tl.store(_addresses(row, 4, at, COPY, BLOCK), p.to(COPY))


@triton.jit
def _adamw_step(
    table, decays, blocks, numbers, lr, beta1, beta2, eps, COPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    if tl.load(numbers) != 0:
        return
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    start = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK
    row = table + tensor * 6
    size, decay = tl.load(row + 5), tl.load(decays + tensor)
    # without a mask a full block loads 16 bytes at a time
    if start + BLOCK <= size:
        _update(row, start, size, decay, numbers, lr, beta1, beta2, eps, COPY, False, BLOCK)
    else:
        _update(row, start, size, decay, numbers, lr, beta1, beta2, eps, COPY, True, BLOCK)


@triton.jit
def _begin_step(norm, steps, count, numbers, clip, scale, log_beta1, log_beta2, BLOCK: tl.constexpr):
    value = tl.load(norm).to(tl.float64)
    finite = (value == value) & (tl.abs(value) < float("inf"))
    added = tl.where(finite, 1.0, 0.0)
    factor = tl.where(clip > 0, tl.maximum((value + 1e-6) / clip, 1.0), 1.0) * scale
    taken = (tl.load(steps) + added).to(tl.float64)
    tl.store(numbers, 1.0 - added)
    tl.store(numbers + 1, factor.to(tl.float32))
    tl.store(numbers + 2, (1.0 - tl.exp(taken * log_beta1)).to(tl.float32))
    tl.store(numbers + 3, (1.0 - tl.exp(taken * log_beta2)).to(tl.float32))
    tl.debug_barrier()  # every thread has read the first count
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(steps + at, tl.load(steps + at, mask=at < count) + added, mask=at < count)


def block_map(sizes: Sequence[int], device: torch.device) -> Tensor:
    """(tensor, block of it) for each program."""
    pairs = [(tensor, block) for tensor, size in enumerate(sizes) for block in range(-(-size // BLOCK))]
    return torch.tensor(pairs, dtype=torch.int64).to(device)


def address_table(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]], device: torch.device
) -> Tensor:
    """Addresses, which are multiples of 16, and sizes of (parameter, gradient, first moment, second moment, copy)."""
    rows = [[0 if part is None else part.data_ptr() for part in parts] + [parts[0].numel()] for parts in tensors]
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def begin_step(
    norm: Tensor, steps: Tensor, numbers: Tensor, clip: float, scale: float, betas: tuple[float, float]
) -> None:
    """Writes the step's four numbers: 1 if it is skipped because the norm is not finite (else 0), the divisor of gradients, both
    1 - betaⁿ. `steps` counts the steps of each tensor, all alike; a skipped one does not count."""
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
    _begin_step[(1,)](norm, steps, len(steps), numbers, clip, scale, *logs, 1024, num_warps=4)


def adamw_step(
    table: Tensor, decays: Tensor, blocks: Tensor, numbers: Tensor, lr: float, betas: tuple[float, float], eps: float,
    copy_dtype: torch.dtype,
) -> None:  # fmt: skip
    """One step of all tensors, with the numbers that `begin_step` wrote."""
    copy = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[copy_dtype]
    _adamw_step[(len(blocks),)](table, decays, blocks, numbers, lr, *betas, eps, copy, BLOCK, num_warps=WARPS)
