"""The implementations of the attention product that fused layers choose from: what each can do, and how long it takes.

A backend that can writes the gradients of q, k and v to their places in one buffer (`Gradients.buffer`); those of the others are
gathered there afterwards. `milliseconds` measures all that take a shape.

Shapes: B batch, H query heads, G key and value heads, T tokens, D head width, C columns of the fused q/k/v projection.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import installed
from holdfast.kernels.trials import agree, kernel_milliseconds
from holdfast.models import attention_kernels as kernels
from holdfast.models.attention_kernels import Asked, Attended, Heads, Places
from holdfast.system.progress import log


class Backend(NamedTuple):
    forward: Callable[[Heads, Asked], Attended]
    backward: Callable[[Tensor, Heads, Asked, Attended, Places | None], Heads]
    """(gradient of the output, heads, asked, attended, where the gradients go if that is given) → the gradients."""
    takes_bias: bool = False
    takes_segments: bool = False
    grouped: bool = True
    """Whether it takes fewer key and value heads than query heads."""
    places: bool = False
    """Whether backward writes to the places that it is given."""
    sums: bool = False
    """Whether it also writes the sums of the gradients."""
    repeats: bool = False
    """Whether the gradients are the same bit for bit in every call, where torch is asked for that."""
    package: str = ""
    """The optional package that it needs."""


BACKENDS = {
    "cudnn": Backend(kernels.cudnn, kernels.cudnn_backward, takes_bias=True),
    "flash": Backend(kernels.flash, kernels.flash_backward, takes_segments=True, repeats=True),
    "efficient": Backend(
        kernels.efficient, kernels.efficient_backward, takes_bias=True, grouped=False, repeats=True
    ),
    "flash4": Backend(
        kernels.flash4, kernels.flash4_backward, takes_segments=True, places=True, package="flash-attn-4"
    ),
    "cudnn-flash4": Backend(kernels.cudnn, kernels.flash4_backward, places=True, package="flash-attn-4"),
    "short": Backend(
        kernels.short, kernels.short_backward, takes_bias=True, grouped=False, places=True, sums=True, repeats=True
    ),
    "cpu": Backend(kernels.cpu, kernels.cpu_backward, takes_bias=True, takes_segments=True, grouped=False),
}  # fmt: skip


class Gradients(NamedTuple):
    heads: Heads
    buffer: Tensor | None = None
    """(B, T, C), if `heads` are views of it."""
    sums: Tensor | None = None
    """Of the buffer's columns, (C), where the backend computes them."""


def heads_of(buffer_BTC: Tensor, queries: int, head: int) -> Heads:
    """Queries, keys and values of a buffer: views, but with more than one query head per group the queries are a copy."""
    slots = buffer_BTC.unflatten(2, (-1, queries + 2, head))
    query = slots[:, :, :, :queries].flatten(2, 3).transpose(1, 2)
    return query, slots[:, :, :, queries].transpose(1, 2), slots[:, :, :, queries + 1].transpose(1, 2)


def forward(name: str, qkv_BTC: Tensor, queries: int, head: int, asked: Asked) -> Attended:
    """Attention of the buffer's `queries` query heads per group of keys and values."""
    q, k, v = heads_of(qkv_BTC, queries, head)
    if queries > 1 and not BACKENDS[name].grouped:
        k, v = k.repeat_interleave(queries, 1), v.repeat_interleave(queries, 1)
    return BACKENDS[name].forward((q, k, v), asked)


def backward(
    name: str, dout: Tensor, qkv_BTC: Tensor, queries: int, head: int, asked: Asked, made: Attended
) -> Gradients:
    """The gradients of the buffer's parts."""
    backend, (q, k, v) = BACKENDS[name], heads_of(qkv_BTC, queries, head)
    if backend.places and queries == 1:  # else the places of the queries are no view
        buffer = torch.empty_like(qkv_BTC)
        sums = torch.empty(len(qkv_BTC), 1, qkv_BTC.shape[2], device=dout.device)
        into = Places(heads_of(buffer, 1, head), heads_of(sums, 1, head))
        heads = backend.backward(dout, (q, k, v), asked, made, into)
        return Gradients(heads, buffer, _total(sums).flatten() if backend.sums else None)
    if queries == 1 or backend.grouped:
        return Gradients(backend.backward(dout, (q, k, v), asked, made, None))
    groups = k.shape[1]
    k, v = k.repeat_interleave(queries, 1), v.repeat_interleave(queries, 1)
    dq, dk, dv = backend.backward(dout, (q, k, v), asked, made, None)
    return Gradients((dq, dk.unflatten(1, (groups, queries)).sum(2), dv.unflatten(1, (groups, queries)).sum(2)))


def _total(sums: Tensor) -> Tensor:
    from holdfast.kernels.column_sums import sum_partial

    return sum_partial(sums)


def chosen(wanted: str | None, qkv_BTC: Tensor, queries: int, head: int, asked: Asked) -> str:
    """The backend to call: the wanted one if it takes this, else one that takes everything that fused layers compute."""
    tokens, device = qkv_BTC.shape[1], qkv_BTC.device
    if wanted is not None and _takes(wanted, tokens, queries, head, asked, device):
        return wanted
    return "cpu" if device.type == "cpu" else "flash" if asked.bias is None else "efficient"


def _takes(name: str, tokens: int, queries: int, head: int, asked: Asked, device: torch.device) -> bool:
    """Whether a backend may be called with this. It may still refuse a shape, or the device."""
    from holdfast.kernels.short_attention import takes

    backend = BACKENDS[name]
    return (
        (name in ("cpu", "short") if device.type == "cpu" else name != "cpu")
        and (name != "short" or (queries == 1 and takes(tokens, head, asked.bias)))
        and (backend.takes_bias or asked.bias is None)
        and (backend.takes_segments or asked.segments is None)
        and (not backend.package or installed(backend.package))
    )


def candidates(shape: tuple[int, int, int, int], groups: int, asked: Asked, device: torch.device) -> list[str]:
    """The backends that may compute attention of this (B, H, T, D)."""
    _, heads, tokens, head = shape
    return [name for name in BACKENDS if _takes(name, tokens, heads // groups, head, asked, device)]


def milliseconds(
    shape: tuple[int, int, int, int], groups: int, asked: Asked, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Time of forward and backward, with the gradients in one buffer, by each GPU backend that computes this (B, H, T, D) right.

    Right: as the first one of those that torch contains, within the rounding of the compute type."""
    batch, heads, tokens, head = shape
    queries = heads // groups
    qkv = torch.randn(batch, tokens, groups * (queries + 2) * head, dtype=dtype, device=device)
    found: dict[str, float] = {}
    wanted: list[Tensor] | None = None
    for name in candidates(shape, groups, asked, device):
        try:
            results, found[name] = _measure(name, qkv, queries, head, asked)
        except Exception as error:  # each library has its own: it does not take this shape, or not on this device
            log(f"attention by {name} is not used: {' '.join(str(error).split())[:200] or type(error).__name__}")
            continue
        wanted = wanted or results
        if not agree(results, wanted):
            log(f"attention by {name} is not used: its results differ from torch's")
            del found[name]
    return found


def _measure(name: str, qkv: Tensor, queries: int, head: int, asked: Asked) -> tuple[list[Tensor], float]:
    """(output and gradient, time)."""
    from holdfast.kernels.attention import gather_gradients
    from holdfast.kernels.column_sums import column_sums

    def run() -> list[Tensor]:
        made = forward(name, qkv, queries, head, asked)
        gradients = backward(name, made.out, qkv, queries, head, asked, made)
        buffer = gradients.buffer
        if buffer is None:
            buffer, _ = gather_gradients(*gradients.heads, None)
        elif gradients.sums is None:
            column_sums(buffer)
        return [made.out, buffer.view_as(qkv)]

    return run(), kernel_milliseconds(run)
