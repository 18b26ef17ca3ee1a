"""The attention product through torch's own kernels, called as plain functions: forward, and backward from what forward returned.

A backend is one of torch's implementations; `milliseconds` measures those that take a shape.

Shapes: B batch, H query heads, G key and value heads, T tokens, D head width.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Attended(NamedTuple):
    out: Tensor
    saved: tuple[Tensor, ...]
    """What backward needs beside q, k, v and the output."""
    lengths: tuple[int, ...]


class Backend(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Attended]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(dout, q, k, v, bias, causal, attended) → dq, dk, dv."""
    takes_bias: bool
    grouped: bool
    """Whether it takes fewer key and value heads than query heads."""


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Attended:
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False)
    out, lse, _, _, longest_q, longest_k, seed, offset, _ = found
    return Attended(out, (lse, seed, offset), (longest_q, longest_k))


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, made: Attended
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, made.out, *made.saved, bias, None, None, *made.lengths, 0.0, causal
    )
    return gradients


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Attended:
    out, lse, _, _, longest_q, longest_k, state, unused, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    return Attended(out, (lse, state, unused), (longest_q, longest_k))


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, made: Attended
) -> tuple[Tensor, Tensor, Tensor]:
    lse, state, unused = made.saved
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, made.out, lse, None, None, *made.lengths, 0.0, causal, state, unused
    )
    return gradients


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Attended:
    out, *saved = aten._scaled_dot_product_efficient_attention(q, k, v, _whole(bias, q, k), True, 0.0, causal)
    return Attended(out, tuple(saved), ())


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, made: Attended
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, _whole(bias, q, k), made.out, *made.saved, 0.0, [True, True, True, False], causal
    )
    return dq, dk, dv


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Attended:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    return Attended(out, (lse,), ())


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, made: Attended
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, made.out, *made.saved, 0.0, causal, attn_mask=bias
    )
    return gradients


def _whole(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias as a view of (B, H, T, T)."""
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


BACKENDS = {
    "cudnn": Backend(_cudnn, _cudnn_backward, takes_bias=True, grouped=True),
    "flash": Backend(_flash, _flash_backward, takes_bias=False, grouped=True),
    "efficient": Backend(_efficient, _efficient_backward, takes_bias=True, grouped=False),
    "cpu": Backend(_cpu, _cpu_backward, takes_bias=True, grouped=False),
}


def forward(name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Attended:
    """Attention of (B, H, T, D) over (B, G, T, D); `bias` is added to the scores, (B, 1, T or 1, T)."""
    queries = 1 if BACKENDS[name].grouped else q.shape[1] // k.shape[1]
    if queries > 1:
        k, v = k.repeat_interleave(queries, 1), v.repeat_interleave(queries, 1)
    return BACKENDS[name].forward(q, k, v, bias, causal)


def backward(
    name: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, made: Attended
) -> tuple[Tensor, Tensor, Tensor]:
    queries, groups = q.shape[1] // k.shape[1], k.shape[1]
    if queries == 1 or BACKENDS[name].grouped:
        return BACKENDS[name].backward(dout, q, k, v, bias, causal, made)
    k, v = k.repeat_interleave(queries, 1), v.repeat_interleave(queries, 1)
    dq, dk, dv = BACKENDS[name].backward(dout, q, k, v, bias, causal, made)
    return dq, dk.unflatten(1, (groups, queries)).sum(2), dv.unflatten(1, (groups, queries)).sum(2)


def default(q: Tensor, bias: Tensor | None) -> str:
    """A backend that takes what the fused layers take, where none was chosen from outside."""
    return "cpu" if q.device.type == "cpu" else "flash" if bias is None else "efficient"


def milliseconds(
    shape: tuple[int, int, int, int], groups: int, masked: bool, causal: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Time of forward and backward by each GPU backend that takes attention of this (B, H, T, D)."""
    batch, heads, tokens, head = shape
    buffer = torch.randn(batch, tokens, heads + 2 * groups, head, dtype=dtype, device=device).transpose(1, 2)
    q, k, v = buffer.split((heads, groups, groups), dim=1)
    bias = torch.zeros(batch, 1, 1 if not causal else tokens, tokens, dtype=dtype, device=device) if masked else None
    found = {}
    for name, backend in BACKENDS.items():
        if name != "cpu" and (backend.takes_bias or not masked):
            with contextlib.suppress(RuntimeError):  # it does not take this shape, or not on this device
                found[name] = _milliseconds(name, q, k, v, bias, causal and not masked)
    return found


def _milliseconds(name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> float:
    """One forward and backward, the shorter of two after one that is not measured."""
    found: list[float] = []
    for _ in range(3):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        made = forward(name, q, k, v, bias, causal)
        backward(name, torch.ones_like(made.out), q, k, v, bias, causal, made)
        last.record()
        last.synchronize()
        found.append(float(first.elapsed_time(last)))
    return min(found[1:])
