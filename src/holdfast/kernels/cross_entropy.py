"""Cross entropy of one chunk of logits: loss and gradient in two passes over a row, the gradient written over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def _cross_entropy(logits, labels, weights, losses, hits, columns, known, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * columns
    label, weight = tl.load(labels + row), tl.load(weights + row)
    highest, normalizer = float("-inf"), 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # Masked by the padded width, then by the vocabulary: a bound that is not a multiple of 16 would split the loads.
        value = tl.load(at + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        value = tl.where(column < known, value, float("-inf"))
        higher = tl.maximum(highest, tl.max(value, 0))
        normalizer = normalizer * tl.exp(highest - higher) + tl.sum(tl.exp(value - higher), 0)
        highest = higher
    target = tl.load(at + label, mask=(label >= 0) & (label < columns), other=0.0).to(tl.float32)
    tl.store(losses + row, (tl.log(normalizer) + highest - target) * weight)
    tl.store(hits + row, ((target >= highest) & (weight > 0)).to(tl.float32))
    factor = weight / normalizer
    tl.debug_barrier()  # every thread has read the label's logit
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(column < known, tl.exp(value - highest) * factor, 0.0)
        gradient = tl.where(column == label, gradient - weight, gradient)
        tl.store(at + column, gradient.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, weights: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """(sum of weight × loss, weighted tokens that were predicted). Columns from `known` on are padding and get no probability."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    hits = torch.empty_like(losses)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _cross_entropy[(rows,)](logits, labels, weights, losses, hits, columns, known, block, num_warps=WARPS)
    return losses.sum(), hits.sum()
