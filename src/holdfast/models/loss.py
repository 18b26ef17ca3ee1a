"""Cross entropy over a large vocabulary, never holding all logits.

The last matrix product and the loss are one autograd function that works through the tokens in chunks and computes the
gradients of hidden states and of the output matrix on the way, so that backward only scales them. The vocabulary may be cut over
ranks: `Cut` says which rows are here and how to combine, this file does not know how.

Shapes: N tokens, H hidden, V rows of the vocabulary here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Tokens × rows of one chunk of fp32 logits: 128 MiB per buffer.
CHUNK_ELEMENTS = 1 << 25


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Cut:
    """Which rows of the vocabulary are here, and how ranks combine. The default is the whole vocabulary on one rank."""

    first_row: int = 0
    reduce_max: Callable[[Tensor], Tensor] = _same
    reduce_sum: Callable[[Tensor], Tensor] = _same
    whole_hidden: Callable[[Tensor], Tensor] = _same
    """All tokens' hidden states from the share that is here; its backward adds up the ranks' gradients."""
    rows_here: Callable[[Tensor], Tensor] = _same
    """The rows of the output matrix that are here."""


class VocabularyLoss(torch.autograd.Function):
    """(sum of weighted losses, number of right predictions) of `weights_N` × cross entropy of `x_NH @ matrix_VHᵀ`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        matrix_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor,
        vocab_size: int,
        cut: Cut,
    ) -> tuple[Tensor, Tensor]:
        tokens, rows = x_NH.shape[0], matrix_VH.shape[0]
        matrix = matrix_VH.to(x_NH.dtype)
        wide = torch.float64 if x_NH.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=x_NH.device)
        right = torch.zeros((), dtype=wide, device=x_NH.device)
        needs_grad = any(ctx.needs_input_grad[:3])
        dx = torch.empty_like(x_NH) if needs_grad else None
        dmatrix = torch.zeros_like(matrix_VH) if needs_grad else None
        dbias = torch.zeros(rows, dtype=wide, device=x_NH.device) if needs_grad and bias_V is not None else None
        chunk = max(1, min(tokens, CHUNK_ELEMENTS // rows))
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            x, weights = x_NH[part], weights_N[part].to(wide)
            logits = (x @ matrix.T).to(wide)
            if bias_V is not None:
                logits = logits + bias_V.to(wide)
            loss, hits, dlogits = _chunk_loss(logits, labels_N[part], vocab_size, cut)
            total += (loss * weights).sum()
            right += (hits * (weights > 0)).sum()
            if dx is not None and dmatrix is not None:
                dlogits *= weights[:, None]
                if dbias is not None:
                    dbias += dlogits.sum(0)
                narrow = dlogits.to(x.dtype)
                dx[part] = narrow @ matrix
                dmatrix += narrow.T @ x
        if needs_grad:
            ctx.save_for_backward(dx, dmatrix, dbias)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx, dmatrix, dbias = ctx.saved_tensors
        dbias = None if dbias is None else dbias * dtotal
        return (dx * dtotal).to(dx.dtype), dmatrix.mul_(dtotal), dbias, None, None, None, None


def _chunk_loss(logits: Tensor, labels: Tensor, vocab_size: int, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, hits and d loss / d logits of one chunk. The logits' memory becomes that of the gradient."""
    here = vocab_size - cut.first_row
    if here < logits.shape[1]:
        logits[:, max(here, 0) :] = -torch.inf  # padded rows are never predicted
    peak = cut.reduce_max(logits.amax(1))
    local = labels - cut.first_row
    mine = (local >= 0) & (local < logits.shape[1])
    index = local.clamp(0, logits.shape[1] - 1)[:, None]
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    target = cut.reduce_sum(torch.where(mine, logits.gather(1, index).squeeze(1), zero))
    probability = logits.sub_(peak[:, None]).exp_()
    normalizer = cut.reduce_sum(probability.sum(1))
    loss = normalizer.log() + peak - target
    dlogits = probability.div_(normalizer[:, None])
    dlogits.scatter_add_(1, index, -mine.to(logits.dtype)[:, None])
    return loss, (target >= peak).to(loss.dtype), dlogits


def vocabulary_loss(
    x_NH: Tensor,
    matrix_VH: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    vocab_size: int,
    bias_V: Tensor | None = None,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of weight × cross entropy, and how many weighted tokens were predicted right."""
    total, right = VocabularyLoss.apply(x_NH, matrix_VH, bias_V, labels_N, weights_N, vocab_size, cut or Cut())  # type: ignore[no-untyped-call]
    return total, right
