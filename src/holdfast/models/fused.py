"""The parts of a transformer layer as autograd functions over Triton kernels: what a GPU runs instead of the plain layer.

The functions compute what the plain layer computes, with less memory traffic: a branch, its bias, the residual sum and the norm
after it are one pass, forward and backward; bias gradients are column sums of passes that run anyway; the gradients of q, k and v
are written into one buffer; products give weight gradients in fp32; weights are read in the compute type from the copy that the
optimizer writes (`compute_copy`). `can_fuse` decides where they are used.

Shapes: B batch, T tokens, H hidden, C columns of the fused q/k/v projection.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast import kernels

if TYPE_CHECKING:
    from holdfast.models.layers import MLP, SelfAttention, TransformerLayer

Rotary = tuple[Tensor, Tensor]
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's attention in the order of preference; the first that takes the shape is used."""


def can_fuse(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused functions compute this layer: pre-norm, on CUDA, in a 16-bit type, whole weights, no dropout."""
    from holdfast.models.layers import TransformerLayer

    if not isinstance(layer, TransformerLayer) or device.type != "cuda" or not kernels.available():
        return False
    attention = layer.self_attention
    whole = type(attention.linear_qkv.weight) is nn.Parameter  # a DTensor is a share of the weight
    dropout = layer.hidden_dropout.p > 0 or attention.dropout > 0
    narrow = dtype in (torch.bfloat16, torch.float16)
    return narrow and whole and not dropout and attention.head in (64, 128)


def can_use_fp8(layer: nn.Module, device: torch.device) -> bool:
    """Whether the device multiplies fp8 matrices of this layer's sizes."""
    sizes = [size for p in layer.parameters() if p.ndim == 2 for size in p.shape]
    return torch.cuda.get_device_capability(device) >= (8, 9) and all(size % 16 == 0 for size in sizes)


def fused_layer(layer: "TransformerLayer", x_BTH: Tensor, rotary: Rotary | None) -> Tensor:
    """The whole layer: attention and MLP, each after its norm and added to the residual stream."""
    attention, mlp, fp8 = layer.self_attention, layer.mlp, layer.fp8
    x_BTH, normed, amax = norm(x_BTH, layer.input_layernorm, fp8=fp8)
    branch = linear(attend(normed, attention, rotary, amax), attention.linear_proj, fp8)
    x_BTH, normed, amax = norm(x_BTH, layer.pre_mlp_layernorm, branch, attention.linear_proj.bias, fp8)
    branch = swiglu_mlp(normed, mlp, fp8) if mlp.swiglu else gelu_mlp(normed, mlp, amax)
    return add(x_BTH, branch, mlp.linear_fc2.bias)


def compute_weight(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter in the compute type: the optimizer's copy where there is a current one."""
    copy: Tensor | None = getattr(parameter, "compute_copy", None)
    if copy is not None and copy.dtype == dtype and parameter.copied_version == parameter._version:  # type: ignore[attr-defined]
        return copy
    return parameter.detach().to(dtype)


def norm(
    x: Tensor, module: nn.Module, branch: Tensor | None = None, bias: Tensor | None = None, fp8: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x + branch + bias, its norm, for fp8 the norm's largest absolute value)."""
    shift, centred = getattr(module, "bias", None), isinstance(module, nn.LayerNorm)
    found: tuple[Tensor, Tensor, Tensor | None]
    found = _Norm.apply(x, branch, bias, module.weight, shift, module.eps, centred, fp8)  # type: ignore[no-untyped-call]
    return found


def linear(x: Tensor, module: nn.Linear, fp8: bool) -> Tensor:
    """The product with the module's weight; its bias is left to the pass that follows."""
    amax = None
    if fp8:
        from holdfast.kernels.fp8 import largest_of

        amax = largest_of(x.detach())
    return _Linear.apply(x, module.weight, amax)  # type: ignore[no-untyped-call,no-any-return]


def attend(x_BTH: Tensor, attention: "SelfAttention", rotary: Rotary | None, amax: Tensor | None) -> Tensor:
    """Projection to q, k and v and the attention itself: (B, T, heads × width)."""
    qkv = attention.linear_qkv
    sizes = (attention.heads_per_group, attention.head)
    return _Attention.apply(x_BTH, qkv.weight, qkv.bias, rotary, sizes, attention.causal, amax)  # type: ignore[no-untyped-call,no-any-return]


def gelu_mlp(x: Tensor, mlp: "MLP", amax: Tensor | None) -> Tensor:
    """Both products and the GELU between them; the bias of the second is left to the pass that follows."""
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    return _GeluMLP.apply(x, fc1.weight, fc1.bias, fc2.weight, mlp.approximate == "tanh", amax)  # type: ignore[no-untyped-call,no-any-return]


def swiglu_mlp(x: Tensor, mlp: "MLP", fp8: bool) -> Tensor:
    """The gated form; the bias of the last product is left to the pass that follows."""
    gate, up = linear(x, mlp.linear_fc1_gate, fp8), linear(x, mlp.linear_fc1_up, fp8)
    if mlp.linear_fc1_gate.bias is not None:
        gate, up = gate + mlp.linear_fc1_gate.bias.to(x.dtype), up + mlp.linear_fc1_up.bias.to(x.dtype)
    return linear(_SwiGLU.apply(gate, up), mlp.linear_fc2, fp8)  # type: ignore[no-untyped-call]


def add(x: Tensor, branch: Tensor, bias: Tensor | None) -> Tensor:
    """x + branch + bias."""
    return x + branch if bias is None else _Add.apply(x, branch, bias)  # type: ignore[no-untyped-call]


Saved = tuple[Tensor, ...]
"""What a product keeps for its gradients: (x, weight) in the compute type, or both transposed in fp8 with their scales."""


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, amax: Tensor | None) -> tuple[Tensor, Saved]:
    """x · weightᵀ + bias; in fp8 where `amax`, the largest absolute value of x, is given."""
    narrow = compute_weight(weight, x.dtype)
    offset = None if bias is None else compute_weight(bias, x.dtype)
    if amax is None:
        return F.linear(x, narrow, offset), (x, narrow)
    from holdfast.kernels.fp8 import E4M3, quantize

    x8, w8 = quantize(_flat(x), E4M3, amax), quantize(narrow, E4M3)
    out = _scaled(x8.values, w8.values, x8.scale, w8.scale, x.dtype, True, offset)
    return out.view(*x.shape[:-1], -1), (x8.transposed, x8.scale, w8.transposed, w8.scale)


def _product_gradients(dy: Tensor, saved: Saved, weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; the weight's in its own type, straight from the product."""
    dy = _flat(dy)
    if len(saved) == 2:
        x, narrow = saved
        x = _flat(x)
        wide = weight.dtype == torch.float32
        return dy @ narrow, torch.mm(dy.T, x, out_dtype=torch.float32) if wide else dy.T @ x
    from holdfast.kernels.fp8 import E5M2, quantize

    x8, x_scale, w8, w_scale = saved
    dy8 = quantize(dy.contiguous(), E5M2, amax)
    dx = _scaled(dy8.values, w8, dy8.scale, w_scale, dy.dtype, True)
    return dx, _scaled(dy8.transposed, x8, dy8.scale, x_scale, weight.dtype, False)


def _scaled(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """a · bᵀ of fp8 matrices. `fast` accumulates in fewer bits: not for weight gradients, whose sums are long."""
    return torch._scaled_mm(a, b.T, a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _note(x: Tensor, fp8: bool) -> Tensor | None:
    """Room for a largest absolute value, where fp8 wants to know it."""
    return torch.zeros((), dtype=torch.float32, device=x.device) if fp8 else None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor, shift: Tensor | None,
        eps: float, centred: bool, fp8: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        from holdfast.kernels.norm import norm_forward

        amax = _note(x, fp8)
        total, out, mean, scale = norm_forward(x, weight, shift, eps, centred, branch, bias, amax)
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.adds, ctx.biased, ctx.shifted = branch is not None, bias is not None, shift is not None
        return (total.view_as(x) if branch is not None else x), out.view_as(x), amax

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        from holdfast.kernels.norm import norm_backward

        total, weight, mean, scale = ctx.saved_tensors
        dx, (dweight, dshift, dbias) = norm_backward(dout, dtotal, total, weight, mean, scale)
        dx = dx.view_as(dout)
        dbranch = dx if ctx.adds else None
        return dx, dbranch, dbias if ctx.biased else None, dweight, dshift if ctx.shifted else None, None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
        from holdfast.kernels.norm import add_bias

        return add_bias(x, branch, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from holdfast.kernels.activation import column_sums

        return dout, dout, column_sums(dout)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, amax: Tensor | None) -> Tensor:
        out, saved = _product(x, weight, None, amax)
        ctx.save_for_backward(weight, *saved)
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        dx, dweight = _product_gradients(dy, tuple(saved), weight)
        return dx.view(ctx.shape), dweight, None


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, tanh: bool, amax: Tensor | None
    ) -> Tensor:
        from holdfast.kernels.activation import gelu_forward

        inner, saved1 = _product(x, weight1, bias1, amax)
        inner_amax = _note(x, amax is not None)
        out, saved2 = _product(gelu_forward(inner, tanh, inner_amax), weight2, None, inner_amax)
        ctx.save_for_backward(weight1, weight2, inner, *saved1, *saved2)
        ctx.biased, ctx.tanh, ctx.fp8, ctx.shape = bias1 is not None, tanh, amax is not None, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from holdfast.kernels.activation import gelu_backward

        weight1, weight2, inner, *saved = ctx.saved_tensors
        half = len(saved) // 2
        dactive, dweight2 = _product_gradients(dy, tuple(saved[half:]), weight2)
        amax = _note(dy, ctx.fp8)
        dinner, dbias1 = gelu_backward(dactive, inner, ctx.tanh, amax)
        dx, dweight1 = _product_gradients(dinner, tuple(saved[:half]), weight1, amax)
        return dx.view(ctx.shape), dweight1, dbias1 if ctx.biased else None, dweight2, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from holdfast.kernels.activation import swiglu_forward

        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        from holdfast.kernels.activation import swiglu_backward

        return swiglu_backward(dout, *ctx.saved_tensors)


class _Attention(torch.autograd.Function):
    """torch's own attention inside; its gradients of q, k and v are gathered by one kernel instead of three copies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rotary: Rotary | None, sizes: tuple[int, int],
        causal: bool, amax: Tensor | None,
    ) -> Tensor:  # fmt: skip
        queries, head = sizes
        qkv, saved = _product(x, weight, bias, amax)
        if rotary is not None:
            from holdfast.kernels.attention import rotate_

            rotate_(qkv, queries, head, rotary)
        batch, tokens, _ = qkv.shape
        slots = qkv.view(batch, tokens, -1, queries + 2, head)
        query = slots[:, :, :, :queries].flatten(2, 3).transpose(1, 2)
        key, value = slots[:, :, :, queries].transpose(1, 2), slots[:, :, :, queries + 1].transpose(1, 2)
        inputs = [part.detach().requires_grad_(any(ctx.needs_input_grad)) for part in (query, key, value)]
        with torch.enable_grad(), sdpa_kernel(ATTENTION, set_priority=True):
            out = F.scaled_dot_product_attention(
                inputs[0], inputs[1], inputs[2], is_causal=causal, enable_gqa=queries > 1
            )
        ctx.save_for_backward(weight, *(rotary or ()), *saved)
        ctx.inputs, ctx.out, ctx.shape = inputs, out, x.shape
        ctx.biased, ctx.fp8, ctx.rotated = bias is not None, amax is not None, 0 if rotary is None else 2
        return out.detach().transpose(1, 2).reshape(batch, tokens, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from holdfast.kernels.attention import gather_gradients

        weight, *rest = ctx.saved_tensors
        rotary, saved = rest[: ctx.rotated], rest[ctx.rotated :]
        batch, tokens, _ = dy.shape
        dout = dy.view(batch, tokens, -1, ctx.out.shape[-1]).transpose(1, 2)
        gradients = torch.autograd.grad(ctx.out, ctx.inputs, dout)
        ctx.inputs = ctx.out = None
        amax = _note(dy, ctx.fp8)
        turns = (rotary[0], rotary[1]) if rotary else None
        dqkv, dbias = gather_gradients(gradients[0], gradients[1], gradients[2], turns, amax)
        dx, dweight = _product_gradients(dqkv, tuple(saved), weight, amax)
        return dx.view(ctx.shape), dweight, dbias if ctx.biased else None, None, None, None, None
