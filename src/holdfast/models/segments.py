"""Causal attention inside documents and windows, with memory that grows linearly with the number of tokens.

A batch is one row of tokens, cut into segments: a document, or the part of it that is in one sample. A token attends to the
tokens before it in its segment, inside the sliding window if there is one. No tokens × tokens mask exists.

Shapes: B batch, T tokens, N = B·T, H query heads, G key heads, D head width.
"""

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which imports the compiler at once
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Trailing empty segments bring their number to a multiple of this: few different shapes for torch.compile.
SEGMENT_MULTIPLE = 64
# Queries of one block, where a window bounds the keys or the scores have no kernel.
BLOCK = 256


@functools.cache
def _varlen_options() -> frozenset[str]:
    """The options of torch's kernel. Its import takes as long as torch's own: the CPU, which has no such kernel, skips it."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def visible(queries: Tensor, keys: Tensor, window: tuple[int, ...]) -> Tensor:
    """Whether each query position attends to each key position: causal, and inside the window if there is one."""
    distances = queries[..., :, None] - keys[..., None, :]
    seen = distances >= 0
    return seen & (distances <= window[0]) if window else seen


@dataclass(frozen=True)
class Scores:
    """How attention weighs keys: the softmax of scale × query·key, bounded by softcap × tanh(score / softcap) unless it is 0."""

    scale: float | None = None
    """None: 1 / sqrt(D)."""
    softcap: float = 0.0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
    ) -> Tensor:
        """Attention of query [B, H, T, D] to key and value [B, G, S, D]; [B, H, T, D].

        `mask` is true where a key is attended to, or added to the scores. `causal`: queries and keys are the same tokens.
        """
        queries = query.shape[1] // key.shape[1]
        if not self.softcap:
            options: dict[str, Any] = {"scale": self.scale, "enable_gqa": queries > 1}
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, **options
            )
        if queries > 1:
            key, value = key.repeat_interleave(queries, 1), value.repeat_interleave(queries, 1)
        scores = query @ key.transpose(2, 3) * (self.scale or query.shape[-1] ** -0.5)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            places = torch.arange(query.shape[2], device=query.device)
            mask = visible(places, places, ())
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        wide = torch.promote_types(scores.dtype, torch.float32)
        return F.dropout(scores.softmax(-1, dtype=wide).to(value.dtype), dropout) @ value


def padded_ends(starts: Tensor, tokens: int, most: int) -> Tensor:
    """The starts of segments and the end of the last one, with empty segments after it so that there is room for `most`."""
    room = (most // SEGMENT_MULTIPLE + 1) * SEGMENT_MULTIPLE
    return F.pad(starts, (0, room - len(starts)), value=tokens)


@dataclass(frozen=True)
class Segments:
    """Segment i is the tokens [ends[i], ends[i + 1]) of the batch's N tokens in one row."""

    ends: Tensor
    longest: int
    window: tuple[int, ...] = ()

    @staticmethod
    def of(documents_BT: Tensor, window: tuple[int, ...] = ()) -> "Segments":
        """The segments of equal consecutive document numbers, in each sample."""
        starts = torch.ones_like(documents_BT, dtype=torch.bool)
        starts[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        ends = starts.flatten().nonzero().flatten().to(torch.int32)
        padded = padded_ends(ends, documents_BT.numel(), len(ends))
        return Segments(padded, documents_BT.shape[1], window)

    @staticmethod
    def rows(batch: int, tokens: int, window: tuple[int, ...], device: torch.device) -> "Segments":
        """One segment per sample."""
        ends = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
        return Segments(ends, tokens, window)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scores: Scores | None = None
    ) -> Tensor:
        """Attention of query [B, H, T, D] to key and value [B, G, T, D]; [B, H, T, D]."""
        batch, _, tokens, _ = query.shape
        scores = scores or Scores()
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # N, heads, D
        half = query.dtype in (torch.bfloat16, torch.float16)
        if query.is_cuda and half and not dropout and scores == Scores() and self._kernel_exists():
            y = self._varlen(*rows)
        else:
            y = _in_turn(self.ends, rows[0], rows[1], rows[2], self.window, dropout, scores)
        attended: Tensor = y.unflatten(0, (batch, tokens)).transpose(1, 2)
        return attended

    def _kernel_exists(self) -> bool:
        return not self.window or "window_size" in _varlen_options()

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": True}
        if "window_size" in _varlen_options():  # how newer versions of torch spell it
            options = {"window_size": (self.window[0] if self.window else -1, 0)}
        if query.shape[1] != key.shape[1]:
            if "enable_gqa" in _varlen_options():
                options["enable_gqa"] = True
            else:
                key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        from torch.nn.attention.varlen import varlen_attn

        y: Any = varlen_attn(query, key, value, self.ends, self.ends, self.longest, self.longest, **options)
        return cast(Tensor, y)


@_disable_dynamo  # the boundaries are new in every batch
def _in_turn(
    ends: Tensor, query: Tensor, key: Tensor, value: Tensor, window: tuple[int, ...], dropout: float, scores: Scores
) -> Tensor:
    """One segment after the other, in blocks of queries where that bounds the memory. All tensors [N, heads, D]."""
    outputs = []
    for start, end in itertools.pairwise(ends.tolist()):
        whole = not scores.softcap and (not window or end - start <= window[0] + 1)
        step = max(end - start, 1) if whole else BLOCK
        for first in range(start, end, step):
            last = min(first + step, end)
            oldest = max(start, first - window[0]) if window else start
            block = (query[first:last], key[oldest:last], value[oldest:last], window, dropout, scores)
            if scores.softcap and torch.is_grad_enabled():  # backward computes the scores again: they are not kept
                outputs.append(checkpoint(_attend, *block, use_reentrant=False))
            else:
                outputs.append(_attend(*block))
    return torch.cat(outputs)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, window: tuple[int, ...], dropout: float, scores: Scores
) -> Tensor:
    """The queries are the last tokens of the keys."""
    mask = None
    if len(query) != len(key) or (window and len(key) > window[0] + 1):
        places = torch.arange(len(key), device=key.device)
        mask = visible(places[-len(query) :], places, window)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return scores.attend(query, key, value, mask, dropout, causal=mask is None)[0].transpose(0, 1)
