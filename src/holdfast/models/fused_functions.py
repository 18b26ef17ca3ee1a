"""The autograd functions of `fused.py`: attention and MLP, each with the norm before it, forward and backward written out.

What backward needs is kept as saved tensors only, so that recomputation reaches it. Backward has no gradient of its own: a second
derivative is refused. fp8 products use the scales of a layer
(`LayerScales`): sites 0 to 3 are the inputs of the four products in the order of use, 4 to 7 the gradients of outputs.

Shapes: B batch, T tokens, C columns of the fused q/k/v projection.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from holdfast.models import attention_backends
from holdfast.models.activation_products import gelu_gradient, linear_gelu
from holdfast.models.attention_backends import Gradients
from holdfast.models.attention_kernels import Asked, Attended
from holdfast.models.products import (
    LayerScales,
    Saved,
    compute_weight,
    factor,
    flat,
    input_gradient,
    product,
    stacked,
    weight_gradient,
)
from holdfast.models.segments import Segments

if TYPE_CHECKING:
    from holdfast.kernels.fp8 import Quantized, Site


class NormOptions(NamedTuple):
    eps: float
    centred: bool
    carried: bool
    """Whether the norm's output is the residual stream, and not its input."""


class AttentionOptions(NamedTuple):
    norm: NormOptions | None
    queries: int
    head: int
    causal: bool
    backend: str | None
    fp8: LayerScales | None
    segments: Segments | None = None


class MLPOptions(NamedTuple):
    norm: NormOptions | None
    swiglu: bool
    tanh: bool
    fp8: LayerScales | None
    epilogue: bool = False
    """Whether products compute the activation and its gradient (`activation_products.py`)."""


def norm_arguments(module: nn.Module | None, carried: bool) -> tuple[Any, Any, NormOptions | None]:
    if module is None:
        return None, None, None
    eps: float = module.eps  # type: ignore[assignment]
    options = NormOptions(eps, isinstance(module, nn.LayerNorm), carried)
    return module.weight, getattr(module, "bias", None), options


def _normalize(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None, shift: Tensor | None,
    options: NormOptions | None, site: "Site | None" = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(the sum, its norm, mean and 1/deviation of each row), shaped as x. Without a norm both are the sum.

    The norm is in fp8 where its site has a delayed scale."""
    from holdfast.kernels.norm import norm_forward

    if options is None or weight is None:
        assert branch is None
        return x, x, None, None
    site = None if options.carried and site is not None and site.delayed else site
    total, out, mean, scale = norm_forward(x, weight, shift, options.eps, options.centred, branch, bias, site)
    return (x if branch is None else total.view_as(x)), out.view_as(x), mean, scale


def _normed_factor(out: Tensor, site: "Site | None", options: NormOptions | None) -> Any:
    """The norm's output as a factor of the first product."""
    if site is not None and site.delayed and options is not None and not options.carried:
        from holdfast.kernels.fp8 import Quantized

        return Quantized(flat(out), None, site.scale)
    return factor(out, site, noted=options is not None)


def _complete(kept: dict[str, list[Any]], site: "Site | None") -> None:
    """Adds what the first product left for backward to write: its input in fp8, transposed."""
    if site is not None and kept["first"][0] is None:
        from holdfast.kernels.norm import norm_transposed

        total, weight, shift, mean, scale = kept["norm"]
        kept["first"][0] = norm_transposed(total, weight, shift, mean, scale, site)


def _norm_gradients(
    dnormed: Tensor, dcarried: Tensor | None, options: NormOptions | None, kept: dict[str, list[Tensor]]
) -> tuple[Tensor | None, ...]:
    """Gradients of x, branch, bias, weight and shift. `dnormed` holds the gradient of a carried norm already."""
    from holdfast.kernels.norm import norm_backward

    if options is None:
        return dnormed, None, None, None, None
    total, weight, _, mean, scale = kept["norm"]
    dtotal = None if options.carried else dcarried
    dx, (dweight, dshift, dbias) = norm_backward(dnormed, dtotal, total, weight, mean, scale)
    dx = dx.view_as(total)
    return dx, dx, dbias, dweight, dshift


def _keep(ctx: Any, **groups: Sequence[Tensor | None]) -> None:
    ctx.groups = {name: len(tensors) for name, tensors in groups.items()}
    ctx.save_for_backward(*(tensor for tensors in groups.values() for tensor in tensors))


def _kept(ctx: Any) -> dict[str, list[Any]]:
    tensors = iter(ctx.saved_tensors)
    return {name: [next(tensors) for _ in range(count)] for name, count in ctx.groups.items()}


def _site(fp8: LayerScales | None, number: int) -> "Site | None":
    return None if fp8 is None else fp8.sites[number]


def _weight8(fp8: LayerScales | None, number: int) -> "Quantized | None":
    return None if fp8 is None else fp8.weights[number]


def _gradients_of(needed: Sequence[bool], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(g if wanted else None for g, wanted in zip(gradients, needed, strict=True))


class AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, norm_weight: Tensor | None,
        norm_shift: Tensor | None, qkv_weight: Tensor, qkv_bias: Tensor | None, proj_weight: Tensor,
        cosine: Tensor | None, sine: Tensor | None, score_bias: Tensor | None, options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        site = _site(options.fp8, 0)
        total, out, mean, scale = _normalize(x, branch, bias, norm_weight, norm_shift, options.norm, site)
        narrow, offset = _compute(qkv_weight, x.dtype), _compute(qkv_bias, x.dtype)
        qkv, first = product(_normed_factor(out, site, options.norm), narrow, offset, _weight8(options.fp8, 0))
        qkv = qkv.view(*x.shape[:-1], -1)
        if cosine is not None and sine is not None:
            from holdfast.kernels.attention import rotate_

            rotate_(qkv, options.queries, options.head, (cosine, sine))
        asked = _asked(score_bias, options)
        ctx.backend = attention_backends.chosen(options.backend, qkv, options.queries, options.head, asked)
        made = attention_backends.forward(ctx.backend, qkv, options.queries, options.head, asked)
        attended = made.out.transpose(1, 2).reshape(*x.shape[:-1], -1)
        branch_out, second = product(
            factor(attended, _site(options.fp8, 1)), _compute(proj_weight, x.dtype), None, _weight8(options.fp8, 1)
        )
        ctx.set_materialize_grads(False)
        ctx.options, ctx.lengths = options, made.lengths
        ctx.dtypes = qkv_weight.dtype, proj_weight.dtype
        _keep(
            ctx, norm=(total, norm_weight, norm_shift, mean, scale), first=first, second=second,
            attention=(qkv, made.out, score_bias, *made.saved), rotary=(cosine, sine),
        )  # fmt: skip
        carried = out if options.norm and options.norm.carried else total
        return carried, branch_out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcarried: Tensor | None, dbranch: Tensor) -> tuple[Tensor | None, ...]:
        options, kept = ctx.options, _kept(ctx)
        qkv, out, score_bias, *saved = kept["attention"]
        dy = factor(flat(dbranch), _site(options.fp8, 4))
        dattended = input_gradient(dy, kept["second"], dbranch.dtype)
        dproj = weight_gradient(dy, kept["second"], ctx.dtypes[1])
        made = Attended(out, tuple(saved), ctx.lengths)
        dout = dattended.view(*qkv.shape[:2], -1, options.head).transpose(1, 2)
        gradients = attention_backends.backward(
            ctx.backend, dout, qkv, options.queries, options.head, _asked(score_bias, options), made
        )
        biased = ctx.needs_input_grad[6]
        dqkv, dbias = _gather(gradients, kept["rotary"], _site(options.fp8, 5), biased)
        onto = dcarried if options.norm is None or options.norm.carried else None
        dnormed = input_gradient(dqkv, kept["first"], dbranch.dtype, onto).view_as(dbranch)
        _complete(kept, _site(options.fp8, 0))
        dqkv_weight = weight_gradient(dqkv, kept["first"], ctx.dtypes[0])
        around = _norm_gradients(dnormed, dcarried, options.norm, kept)
        return _gradients_of(ctx.needs_input_grad, (*around, dqkv_weight, dbias, dproj, None, None, None, None))


class MLPBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, norm_weight: Tensor | None,
        norm_shift: Tensor | None, weight1: Tensor, up_weight: Tensor | None, bias1: Tensor | None,
        up_bias: Tensor | None, weight2: Tensor, options: MLPOptions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        site = _site(options.fp8, 2)
        total, out, mean, scale = _normalize(x, branch, bias, norm_weight, norm_shift, options.norm, site)
        narrow, offset = _compute(weight1, x.dtype, up_weight), _compute(bias1, x.dtype, up_bias)
        first: Saved = (out, narrow)
        if options.epilogue:
            inner, active = linear_gelu(flat(out), narrow, offset)
        else:
            inner, first = product(_normed_factor(out, site, options.norm), narrow, offset, _weight8(options.fp8, 2))
            inner = flat(inner)
            active = _activate(inner, options)
        branch_out, second = product(active, _compute(weight2, x.dtype), None, _weight8(options.fp8, 3))
        if options.epilogue:
            second = (None, second[1])  # backward computes the activation again
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtypes, ctx.rows = options, (weight1.dtype, weight2.dtype), len(weight1)
        _keep(ctx, norm=(total, norm_weight, norm_shift, mean, scale), inner=(inner,), first=first, second=second)
        carried = out if options.norm and options.norm.carried else total
        return carried, branch_out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcarried: Tensor | None, dbranch: Tensor) -> tuple[Tensor | None, ...]:
        options, kept = ctx.options, _kept(ctx)
        dy = factor(flat(dbranch), _site(options.fp8, 6))
        biased = ctx.needs_input_grad[7]
        if options.epilogue:
            dinner, dbias1 = _epilogue_gradient(dy, kept, biased)
        else:
            dactive = input_gradient(dy, kept["second"], dbranch.dtype)
            dinner, dbias1 = _activation_gradient(dactive, kept["inner"][0], options, biased)
        dweight2 = weight_gradient(dy, kept["second"], ctx.dtypes[1])
        onto = dcarried if options.norm is None or options.norm.carried else None
        dnormed = input_gradient(dinner, kept["first"], dbranch.dtype, onto).view_as(dbranch)
        _complete(kept, _site(options.fp8, 2))
        dweight1 = weight_gradient(dinner, kept["first"], ctx.dtypes[0])
        around = _norm_gradients(dnormed, dcarried, options.norm, kept)
        pairs = [
            (whole[: ctx.rows], whole[ctx.rows :]) if whole is not None else (None, None)
            for whole in (dweight1, dbias1)
        ]
        return _gradients_of(ctx.needs_input_grad, (*around, *pairs[0], *pairs[1], dweight2, None))


def _compute(parameter: Tensor | None, dtype: torch.dtype, below: Tensor | None = None) -> Any:
    """The parameter in the compute type, with the rows of another one below it where there is one."""
    if parameter is None:
        return None
    upper = compute_weight(parameter, dtype)
    return upper if below is None else stacked(upper, compute_weight(below, dtype))


def _asked(score_bias: Tensor | None, options: AttentionOptions) -> Asked:
    causal = options.causal and score_bias is None  # a mask of the model says it itself
    return Asked(score_bias, causal, options.segments)


def _gather(
    gradients: Gradients, rotary: list[Tensor | None], site: "Site | None", biased: bool
) -> tuple[Any, Tensor | None]:
    """The gradient of the q/k/v buffer as a factor of products, and its column sums where they are free or needed."""
    from holdfast.kernels.attention import gather_gradients, gather_gradients_fp8
    from holdfast.kernels.column_sums import column_sums

    turns = None if rotary[0] is None or rotary[1] is None else (rotary[0], rotary[1])
    if site is not None and site.delayed:
        return gather_gradients_fp8(*gradients.heads, turns, site)
    if gradients.buffer is not None and turns is None and site is None:
        sums = gradients.sums if gradients.sums is not None or not biased else column_sums(gradients.buffer)
        return flat(gradients.buffer), sums
    amax = None if site is None else site.amax
    dqkv, sums = gather_gradients(*gradients.heads, turns, amax, gradients.buffer)
    return factor(dqkv, site, noted=True), sums


def _activate(inner: Tensor, options: MLPOptions) -> Any:
    """GELU or SwiGLU as a factor of the next product."""
    from holdfast.kernels.activation import gelu_forward, swiglu_forward
    from holdfast.kernels.activation_fp8 import gelu_forward_fp8, swiglu_forward_fp8

    site = _site(options.fp8, 3)
    if site is not None and site.delayed:
        return swiglu_forward_fp8(inner, site) if options.swiglu else gelu_forward_fp8(inner, options.tanh, site)
    amax = None if site is None else site.amax
    active = swiglu_forward(inner, amax) if options.swiglu else gelu_forward(inner, options.tanh, amax)
    return factor(active, site, noted=True)


def _activation_gradient(dout: Tensor, inner: Tensor, options: MLPOptions, biased: bool) -> tuple[Any, Tensor | None]:
    """The gradient of the activation's input as a factor of products, and its column sums where they are free or needed."""
    from holdfast.kernels.activation import gelu_backward, swiglu_backward
    from holdfast.kernels.activation_fp8 import gelu_backward_fp8, swiglu_backward_fp8
    from holdfast.kernels.column_sums import column_sums

    site, sums = _site(options.fp8, 7), None
    if site is not None and site.delayed and not (options.swiglu and biased):
        if options.swiglu:
            return swiglu_backward_fp8(dout, inner, site), None
        return gelu_backward_fp8(dout, inner, options.tanh, site)
    amax = None if site is None or site.delayed else site.amax
    if options.swiglu:
        dinner = swiglu_backward(dout, inner, amax)
        sums = column_sums(dinner) if biased else None
    else:
        dinner, sums = gelu_backward(dout, inner, options.tanh, amax)
    return factor(dinner, site, noted=amax is not None), sums


def _epilogue_gradient(dy: Any, kept: dict[str, list[Any]], biased: bool) -> tuple[Tensor, Tensor | None]:
    """The same from the second product's output gradient. Adds the activation to what that product kept."""
    from holdfast.kernels.column_sums import column_sums

    dinner, kept["second"][0] = gelu_gradient(dy, kept["second"][1], kept["inner"][0])
    return dinner, column_sums(dinner) if biased else None


class Norm(torch.autograd.Function):
    """The norm after the last layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor, shift: Tensor | None,
        options: NormOptions,
    ) -> Tensor:  # fmt: skip
        total, out, mean, scale = _normalize(x, branch, bias, weight, shift, options)
        ctx.options = options
        _keep(ctx, norm=(total, weight, shift, mean, scale))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients_of(ctx.needs_input_grad, (*_norm_gradients(dout, None, ctx.options, _kept(ctx)), None))


class Add(torch.autograd.Function):
    """The sum after the last layer of a pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
        from holdfast.kernels.norm import add_bias

        return add_bias(x, branch, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from holdfast.kernels.column_sums import column_sums

        return dout, dout, column_sums(dout)
