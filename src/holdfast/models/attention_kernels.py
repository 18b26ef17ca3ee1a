"""The attention product by kernels of torch, of this package and of flash-attention, as plain functions: forward, and backward
from what forward returned. `attention_backends.py` chooses between them.

Shapes: B batch, H query heads, G key and value heads, T tokens, D head width, C columns of the fused q/k/v projection, N = B·T.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.models.segments import Segments, visible

aten = torch.ops.aten
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries (B, H, T, D), keys and values (B, G, T, D), or their gradients."""


class Asked(NamedTuple):
    """What is to be computed beside q, k and v."""

    bias: Tensor | None
    """Added to the scores, (B or 1, 1, T or 1, T)."""
    causal: bool
    segments: Segments | None = None
    """Tokens attend inside these, causally, and not to others of their sample."""


class Attended(NamedTuple):
    out: Tensor
    saved: tuple[Tensor, ...]
    """What backward needs beside q, k, v and the output."""
    lengths: tuple[int, ...]


class Places(NamedTuple):
    """Where backward writes the gradients, if it can."""

    heads: Heads
    sums: Heads
    """For the sums over each sample's tokens, (B, heads, 1, D) in fp32."""


def cudnn(heads: Heads, asked: Asked) -> Attended:
    found = aten._scaled_dot_product_cudnn_attention(*heads, asked.bias, True, 0.0, asked.causal, False)
    out, lse, _, _, longest_q, longest_k, seed, offset, _ = found
    return Attended(out, (lse, seed, offset), (longest_q, longest_k))


def cudnn_backward(dout: Tensor, heads: Heads, asked: Asked, made: Attended, into: Places | None) -> Heads:
    gradients: Heads = aten._scaled_dot_product_cudnn_attention_backward(
        dout, *heads, made.out, *made.saved, asked.bias, None, None, *made.lengths, 0.0, asked.causal
    )
    return gradients


def flash(heads: Heads, asked: Asked) -> Attended:
    """FlashAttention 2, which torch contains."""
    if asked.segments is None:
        found = aten._scaled_dot_product_flash_attention(*heads, 0.0, asked.causal)
        out, lse, _, _, longest_q, longest_k, state, unused, _ = found
        return Attended(out, (lse, state, unused), (longest_q, longest_k))
    ends, longest, window = asked.segments.ends, asked.segments.longest, _window(asked.segments)
    out, lse, state, unused, _ = aten._flash_attention_forward(
        *map(_rows, heads), ends, ends, longest, longest, 0.0, True, False, **window
    )
    return Attended(_from_rows(out, heads[0]), (lse, state, unused), ())


def flash_backward(dout: Tensor, heads: Heads, asked: Asked, made: Attended, into: Places | None) -> Heads:
    lse, state, unused = made.saved
    gradients: Heads
    if asked.segments is None:
        gradients = aten._scaled_dot_product_flash_attention_backward(
            dout, *heads, made.out, lse, None, None, *made.lengths, 0.0, asked.causal, state, unused
        )
        return gradients
    ends, longest, window = asked.segments.ends, asked.segments.longest, _window(asked.segments)
    found = aten._flash_attention_backward(
        _rows(dout), *map(_rows, heads), _rows(made.out), lse, ends, ends, longest, longest, 0.0, True, state, unused, **window
    )  # fmt: skip
    dq, dk, dv = (_from_rows(gradient, heads[0]) for gradient in found)
    return dq, dk, dv


def _window(segments: Segments) -> dict[str, int]:
    return {"window_size_left": segments.window[0], "window_size_right": 0} if segments.window else {}


def flash4(heads: Heads, asked: Asked) -> Attended:
    """FlashAttention 4, of the optional package flash-attn-4."""
    from flash_attn.cute.interface import _flash_attn_fwd

    options, rows = _flash4_options(heads, asked)
    out, lse, *_ = _flash_attn_fwd(*rows, return_lse=True, **options)
    return Attended(_from_rows(out, heads[0]), (lse,), ())


def flash4_backward(dout: Tensor, heads: Heads, asked: Asked, made: Attended, into: Places | None) -> Heads:
    """Also from what cuDNN's forward returned: the log of the normalizer, (B, H, T, 1)."""
    from flash_attn.cute.interface import _flash_attn_bwd

    options, rows = _flash4_options(heads, asked)
    (lse, *_), shaped = made.saved, _rows if asked.segments else _tokens_first
    if asked.segments is None:
        lse = lse.view(made.out.shape[:3])
    places = dict(zip(("dq", "dk", "dv"), map(shaped, into.heads), strict=True)) if into else {}
    found = _flash_attn_bwd(*rows, shaped(made.out), shaped(dout), lse, **options, **places)
    dq, dk, dv = (_from_rows(gradient, heads[0]) for gradient in found)
    return dq, dk, dv


def _flash4_options(heads: Heads, asked: Asked) -> tuple[dict[str, Any], list[Tensor]]:
    if asked.segments is None:
        return {"causal": asked.causal}, [_tokens_first(part) for part in heads]
    ends, longest, window = asked.segments.ends, asked.segments.longest, _window(asked.segments)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"causal": not window, **lengths, **window}, [_rows(part) for part in heads]


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """(N, heads, D) of (B, heads, T, D): a view of parts of a buffer."""
    return x.transpose(1, 2).flatten(0, 1)


def _from_rows(x: Tensor, like: Tensor) -> Tensor:
    """(B, heads, T, D) of (N, heads, D) or (B, T, heads, D)."""
    return (x.unflatten(0, (like.shape[0], like.shape[2])) if x.ndim == 3 else x).transpose(1, 2)


def efficient(heads: Heads, asked: Asked) -> Attended:
    bias = _whole(asked.bias, *heads[:2])
    out, *saved = aten._scaled_dot_product_efficient_attention(*heads, bias, True, 0.0, asked.causal)
    return Attended(out, tuple(saved), ())


def efficient_backward(dout: Tensor, heads: Heads, asked: Asked, made: Attended, into: Places | None) -> Heads:
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, *heads, _whole(asked.bias, *heads[:2]), made.out, *made.saved, 0.0, [True, True, True, False], asked.causal
    )  # fmt: skip
    return dq, dk, dv


def cpu(heads: Heads, asked: Asked) -> Attended:
    """For tests of the fused layers without a GPU."""
    asked = _dense(heads[0], asked)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, asked.causal, attn_mask=asked.bias)
    return Attended(out, (lse,), ())


def cpu_backward(dout: Tensor, heads: Heads, asked: Asked, made: Attended, into: Places | None) -> Heads:
    asked = _dense(heads[0], asked)
    gradients: Heads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *heads, made.out, *made.saved, 0.0, asked.causal, attn_mask=asked.bias
    )
    return gradients


def _dense(q: Tensor, asked: Asked) -> Asked:
    """The segments as a bias."""
    if asked.segments is None:
        return asked
    batch, _, tokens, _ = q.shape
    places = torch.arange(batch * tokens)
    number = torch.searchsorted(asked.segments.ends.long(), places, right=True).view(batch, tokens)
    seen = (number[:, :, None] == number[:, None]) & visible(places[:tokens], places[:tokens], asked.segments.window)
    return Asked(torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)[:, None], False)


def short(heads: Heads, asked: Asked) -> Attended:
    """Of this package: all scores of a head at once."""
    from holdfast.kernels.short_attention import short_attention

    batch, count, tokens, head = heads[0].shape
    out = torch.empty(batch, tokens, count, head, dtype=heads[0].dtype, device=heads[0].device).transpose(1, 2)
    out, lse = short_attention(*heads, asked.bias, asked.causal, out)
    return Attended(out, (lse,), ())


def _whole(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias as a view of (B, H, T, T)."""
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def short_backward(dout: Tensor, heads: Heads, asked: Asked, made: Attended, into: Places | None) -> Heads:
    from holdfast.kernels.short_attention import short_attention_backward

    assert into is not None
    (lse,) = made.saved
    short_attention_backward(dout, *heads, asked.bias, asked.causal, lse, into.heads, into.sums)
    return into.heads
