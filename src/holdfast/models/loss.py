"""Cross entropy over a large vocabulary, never holding all logits.

The last matrix product and the loss are one autograd function that works through the tokens in chunks and computes the
gradients of hidden states and of the output matrix on the way, so that backward only scales them. The vocabulary may be sharded
over ranks: `VocabShard` holds the range of this rank's rows and the collectives over the shards.

z-loss adds coefficient × log²Z to each token's cross entropy, Z being the sum that normalizes its softmax: it keeps logits from
drifting. Its gradient, 2 × coefficient × log Z × probability, changes only the factor of the probabilities.

A chunk is worked through in place, operation by operation, or by kernels that read the logits in the compute type and write
their gradient over them.

Shapes: N tokens, H hidden, V rows of the vocabulary here.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from holdfast import kernels
from holdfast.models.products import compute_weight

# Tokens × rows of one chunk of logits. In fp32, one operation at a time: 128 MiB per buffer.
CHUNK_ELEMENTS = 1 << 25
# Compiled, there is one buffer in the compute type (1 GiB in bf16), and long products run best.
COMPILED_CHUNK_ELEMENTS = 1 << 29


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the vocabulary and the collectives over its shards. Default: the whole vocabulary on one rank."""

    first_row: int = 0
    reduce_max: Callable[[Tensor], Tensor] = _identity
    reduce_sum: Callable[[Tensor], Tensor] = _identity
    gather_hidden: Callable[[Tensor], Tensor] = _identity
    """Gathers the hidden states of all tokens; backward sums the gradients over the ranks."""
    gather_tokens: Callable[[Tensor], Tensor] = _identity
    """Gathers the hidden states of all tokens for a computation that every rank repeats; backward takes this rank's slice."""
    copy_hidden: Callable[[Tensor], Tensor] = _identity
    """Passes on hidden states that every rank holds; backward sums the gradients over the ranks."""
    local_rows: Callable[[Tensor], Tensor] = _identity
    """This rank's rows of the output matrix."""
    compiled: bool = False
    """Whether compiled kernels compute the chunks."""


class VocabularyLoss(torch.autograd.Function):
    """(sum of weighted losses, number of right predictions, z-loss in the sum) of `x_NH @ matrix_VHᵀ`. A token's loss is its
    cross entropy and its z-loss."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        matrix_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor,
        vocab_size: int,
        shard: VocabShard,
        z_loss: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, rows = x_NH.shape[0], matrix_VH.shape[0]
        matrix = compute_weight(matrix_VH, x_NH.dtype)
        wide = torch.float64 if x_NH.dtype == torch.float64 else torch.float32
        total, right, z_total = (torch.zeros((), dtype=wide, device=x_NH.device) for _ in range(3))
        needs_grad = any(ctx.needs_input_grad[:3])
        dx = torch.empty_like(x_NH) if needs_grad else None
        # Chunks are added up in fp32 also where the matrix is not: FSDP2 gathers it in the compute type.
        summed = torch.promote_types(matrix_VH.dtype, torch.float32)
        dmatrix = torch.zeros_like(matrix_VH, dtype=summed) if needs_grad else None
        dbias = torch.zeros(rows, dtype=wide, device=x_NH.device) if needs_grad and bias_V is not None else None
        compiled = shard.compiled and not softcap
        chunk_loss = _compiled_chunk_loss if compiled else _chunk_loss
        chunk = _chunk_tokens(tokens, rows, compiled)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            x, weights = x_NH[part], weights_N[part].to(wide)
            logits = F.linear(x, matrix, None if bias_V is None else bias_V.to(x.dtype))
            if softcap:
                bounded = torch.tanh(logits.to(wide) / softcap)
                logits = bounded * softcap
            loss, hits, z, dlogits = chunk_loss(logits, labels_N[part], weights, vocab_size, shard, z_loss)
            if softcap:
                dlogits = (dlogits * (1 - bounded.square_())).to(x.dtype)
            total += loss
            right += hits
            z_total += z
            if dx is not None and dmatrix is not None:
                if dbias is not None:
                    dbias += dlogits.sum(0, dtype=wide)
                torch.mm(dlogits, matrix, out=dx[part])
                if dmatrix.dtype == torch.float32 and x.is_cuda and x.dtype != torch.float32:
                    torch.addmm(dmatrix, dlogits.T, x, out_dtype=torch.float32, out=dmatrix)
                else:
                    dmatrix += dlogits.T @ x
            del logits, dlogits  # the next chunk takes this one's memory
        if dmatrix is not None:
            ctx.save_for_backward(dx, dmatrix.to(matrix_VH.dtype), dbias)
        ctx.mark_non_differentiable(right, z_total)
        return total, right, z_total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dx, dmatrix, dbias = ctx.saved_tensors
        dbias = None if dbias is None else dbias * dtotal
        return (dx * dtotal).to(dx.dtype), dmatrix.mul_(dtotal), dbias, None, None, None, None, None, None


def _chunk_tokens(tokens: int, rows: int, compiled: bool) -> int:
    """Tokens per chunk; compiled chunks are of one size where possible, since each size is a compilation."""
    if not compiled:
        return max(1, min(tokens, CHUNK_ELEMENTS // rows))
    least = max(1, -(-tokens * rows // COMPILED_CHUNK_ELEMENTS))
    count = next((count for count in range(least, 2 * least) if tokens % count == 0), least)
    return max(1, -(-tokens // count))


def _with_z(log_z: Tensor, target: Tensor, weights: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a chunk, z-loss in it, and the factor of each token's probabilities in its gradient."""
    loss = ((log_z - target) * weights).sum()
    if not z_loss:
        return loss, torch.zeros_like(loss), weights
    z = z_loss * (log_z.square() * weights).sum()
    return loss + z, z, weights * (1 + 2 * z_loss * log_z)


def _chunk_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, vocab_size: int, shard: VocabShard, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, hits, z-loss and d loss / d logits of one chunk. The wide logits' memory becomes that of the gradient."""
    narrow = logits.dtype
    logits = logits.to(weights.dtype)
    here = vocab_size - shard.first_row
    if here < logits.shape[1]:
        logits[:, max(here, 0) :] = -torch.inf  # padded rows are never predicted
    peak = shard.reduce_max(logits.amax(1))
    local = labels - shard.first_row
    mine = (local >= 0) & (local < logits.shape[1])
    index = local.clamp(0, logits.shape[1] - 1)[:, None]
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    target = shard.reduce_sum(torch.where(mine, logits.gather(1, index).squeeze(1), zero))
    probability = logits.sub_(peak[:, None]).exp_()
    normalizer = shard.reduce_sum(probability.sum(1))
    loss, z, factor = _with_z(normalizer.log() + peak, target, weights, z_loss)
    hits = ((target >= peak) & (weights > 0)).sum()
    dlogits = probability.mul_((factor / normalizer)[:, None])
    dlogits.scatter_add_(1, index, -(mine * weights)[:, None])
    return loss, hits, z, dlogits.to(narrow)


def _compiled_chunk_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, vocab_size: int, shard: VocabShard, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by compiled kernels. The logits' own memory becomes that of the gradient."""
    local, here = labels - shard.first_row, vocab_size - shard.first_row
    if shard.reduce_sum is _identity and logits.is_cuda and kernels.available() and not z_loss:
        from holdfast.kernels.cross_entropy import cross_entropy_

        loss, hits = cross_entropy_(logits, local, weights, here)
        return loss, hits, torch.zeros_like(loss), logits
    if shard.reduce_sum is _identity:
        return *_compiled(_whole_chunk)(logits, local, weights, here, z_loss), logits
    peak = shard.reduce_max(_compiled(_peaks)(logits, here, weights.dtype))
    normalizer, target = shard.reduce_sum(_compiled(_sums)(logits, local, peak, here))
    return *_compiled(_gradient_)(logits, local, weights, peak, normalizer, target, here, z_loss), logits


def _whole_chunk(
    logits: Tensor, local: Tensor, weights: Tensor, here: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    peak = _peaks(logits, here, weights.dtype)
    normalizer, target = _sums(logits, local, peak, here)
    return _gradient_(logits, local, weights, peak, normalizer, target, here, z_loss)


def _masked(logits: Tensor, here: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Wide logits without padded rows, and the numbers of the rows."""
    row = torch.arange(logits.shape[1], device=logits.device)[None]
    return torch.where(row < here, logits.to(wide), -torch.inf), row


def _peaks(logits: Tensor, here: int, wide: torch.dtype) -> Tensor:
    return _masked(logits, here, wide)[0].amax(1)


def _sums(logits: Tensor, local: Tensor, peak: Tensor, here: int) -> Tensor:
    """The softmax's normalizer and the logit of the label (0 where another rank has it)."""
    wide, row = _masked(logits, here, peak.dtype)
    target = torch.where(row == local[:, None], wide, 0.0).sum(1)
    return torch.stack(((wide - peak[:, None]).exp().sum(1), target))


def _gradient_(
    logits: Tensor,
    local: Tensor,
    weights: Tensor,
    peak: Tensor,
    normalizer: Tensor,
    target: Tensor,
    here: int,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, hits and z-loss; writes d loss / d logits over the logits."""
    wide, row = _masked(logits, here, weights.dtype)
    loss, z, factor = _with_z(normalizer.log() + peak, target, weights, z_loss)
    probability = (wide - peak[:, None]).exp() / normalizer[:, None]
    targets = (row == local[:, None]).to(wide.dtype)
    logits.copy_(probability * factor[:, None] - targets * weights[:, None])
    return loss, ((target >= peak) & (weights > 0)).sum(), z


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def vocabulary_loss(
    x_NH: Tensor,
    matrix_VH: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    vocab_size: int,
    bias_V: Tensor | None = None,
    shard: VocabShard | None = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over tokens of weight × (cross entropy and z-loss), how many weighted tokens were predicted right, and how much of the
    sum is z-loss (without a gradient). `softcap`: the logits x are softcap × tanh(x / softcap), unless it is 0."""
    total, right, z = VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        x_NH, matrix_VH, bias_V, labels_N, weights_N, vocab_size, shard or VocabShard(), z_loss, softcap
    )
    return total, right, z
