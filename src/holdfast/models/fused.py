"""A transformer layer as two autograd functions over Triton kernels: what a GPU runs instead of the plain layer.

Attention with the norm before it is one function, the MLP with its norm the other. They compute what the plain layer computes,
with less memory traffic: a branch, its bias, the residual sum and the norm after it are one pass, forward and backward; bias
gradients are column sums of passes that run anyway; the gradients of q, k and v are written into one buffer; products give weight
gradients in fp32.

Between the functions the residual stream is a sum that is not computed yet (`ResidualStream`). `why_not_fused` decides where
the functions are used.

Shapes: B batch, T tokens, H hidden.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast import kernels
from holdfast.models.fused_functions import (
    Add,
    AttentionBlock,
    AttentionOptions,
    MLPBlock,
    MLPOptions,
    Norm,
    norm_arguments,
)
from holdfast.models.products import LayerScales
from holdfast.models.segments import Segments

if TYPE_CHECKING:
    from holdfast.models.layers import MLP, SelfAttention, TransformerLayer

Rotary = tuple[Tensor, Tensor]


class ResidualStream(NamedTuple):
    """The sum x + branch + bias between functions, not added up yet; `norm` still has to be applied to it."""

    x: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None
    norm: nn.Module | None = None


def why_not_fused(layer: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused functions cannot compute this layer; None if they can."""
    attention = layer.self_attention
    reasons = {
        "the device is not a GPU": device.type != "cuda",
        "Triton is not installed": not kernels.available(),
        "the compute type is fp32": dtype not in (torch.bfloat16, torch.float16),
        "tensor parallelism": type(attention.linear_qkv.weight)
        is not nn.Parameter,  # a DTensor is a share of the weight
        "qk_layernorm, use_parallel_residual, rotary_percent or an option of Gemma": not getattr(
            layer, "can_fuse", True
        ),
        "dropout": layer.hidden_dropout.p > 0 or attention.dropout > 0,
        f"the head width {attention.head} is not 64 or 128": attention.head not in (64, 128),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def can_use_fp8(layer: nn.Module, device: torch.device) -> bool:
    """Whether the device multiplies fp8 matrices of this layer's sizes."""
    sizes = [size for p in layer.parameters() if p.ndim == 2 for size in p.shape]
    return torch.cuda.get_device_capability(device) >= (8, 9) and all(size % 16 == 0 for size in sizes)


def fp8_weights(layer: Any) -> list[tuple[Tensor, ...]]:
    """The matrices of a layer's products in the order of use, as `ScaleTable` takes them."""
    attention, mlp = layer.self_attention, layer.mlp
    inner = (mlp.linear_fc1_gate.weight, mlp.linear_fc1_up.weight) if mlp.swiglu else (mlp.linear_fc1.weight,)
    return [(attention.linear_qkv.weight,), (attention.linear_proj.weight,), inner, (mlp.linear_fc2.weight,)]


def fused_layer(
    layer: "TransformerLayer", x: Tensor | ResidualStream, rotary: Rotary | None, mask: Tensor | Segments | None
) -> ResidualStream:
    """A pre-norm layer: attention and MLP, each after its norm and added to the residual stream."""
    stream = x if isinstance(x, ResidualStream) else ResidualStream(x)
    fp8 = layer.fp8() if layer.fp8 else None
    stream = attention_block(stream, layer.input_layernorm, layer.self_attention, rotary, mask, fp8)
    return mlp_block(stream, layer.pre_mlp_layernorm, layer.mlp, fp8)


def fused_post_norm_layer(layer: Any, x: Tensor | ResidualStream, score_bias: Tensor | None) -> ResidualStream:
    """The same with the norms after the sums: the residual stream is what the norms give."""
    stream = x if isinstance(x, ResidualStream) else ResidualStream(x)
    fp8 = layer.fp8() if layer.fp8 else None
    stream = attention_block(stream, None, layer.self_attention, None, score_bias, fp8)
    stream = mlp_block(stream._replace(norm=layer.post_attention_layernorm), None, layer.mlp, fp8)
    return stream._replace(norm=layer.post_mlp_layernorm)


def settled(x: Tensor | ResidualStream) -> Tensor:
    """The stream's sum, normalised where a norm is due."""
    if isinstance(x, Tensor):
        return x
    if x.norm is not None:
        return normed(x._replace(norm=None), x.norm)
    if x.branch is None:
        return x.x
    return x.x + x.branch if x.bias is None else Add.apply(x.x, x.branch, x.bias)  # type: ignore[no-untyped-call]


def normed(x: Tensor | ResidualStream, module: nn.Module) -> Tensor:
    """The norm of the stream's sum."""
    if isinstance(x, Tensor):
        out: Tensor = module(x)
        return out
    weight, shift, options = norm_arguments(module, False)
    return Norm.apply(x.x, x.branch, x.bias, weight, shift, options)  # type: ignore[no-untyped-call,no-any-return]


def score_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the attention scores for a mask that is true where a token may be attended to."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def attention_block(
    stream: ResidualStream, norm: nn.Module | None, attention: "SelfAttention", rotary: Rotary | None,
    mask: Tensor | Segments | None, fp8: LayerScales | None,
) -> ResidualStream:  # fmt: skip
    """Norm, projection to q, k and v, attention, output projection, whose bias is left to the pass that follows.

    `mask`: a bias of the scores, or the segments that tokens attend in."""
    due = norm_arguments(norm or stream.norm, carried=norm is None)
    qkv, proj = attention.linear_qkv, attention.linear_proj
    bias, segments = (None, mask) if isinstance(mask, Segments) else (mask, None)
    options = AttentionOptions(
        due[2], attention.heads_per_group, attention.head, attention.causal, attention.backend, fp8, segments
    )
    x, branch = AttentionBlock.apply(  # type: ignore[no-untyped-call]
        *stream[:3], *due[:2], qkv.weight, qkv.bias, proj.weight, *(rotary or (None, None)), bias, options
    )
    return ResidualStream(x, branch, proj.bias)


def mlp_block(stream: ResidualStream, norm: nn.Module | None, mlp: "MLP", fp8: LayerScales | None) -> ResidualStream:
    """Norm, both products and the activation between them; the bias of the last is left to the pass that follows."""
    due = norm_arguments(norm or stream.norm, carried=norm is None)
    inner = (mlp.linear_fc1_gate, mlp.linear_fc1_up) if mlp.swiglu else (mlp.linear_fc1, None)
    weights = [None if part is None else part.weight for part in inner]
    biases = [None if part is None else part.bias for part in inner]
    options = MLPOptions(due[2], mlp.swiglu, mlp.approximate == "tanh", fp8, mlp.epilogue and fp8 is None)
    x, branch = MLPBlock.apply(*stream[:3], *due[:2], *weights, *biases, mlp.linear_fc2.weight, options)  # type: ignore[no-untyped-call]
    return ResidualStream(x, branch, mlp.linear_fc2.bias)
