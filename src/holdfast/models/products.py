"""Matrix products of linear layers and their gradients, in the compute type or in fp8.

A factor of a product is a matrix in the compute type, or a `Quantized` one. Weights are read in the compute type from the copy
that the optimizer writes (`compute_copy`), or are quantized from it.

Shapes: N tokens, I input columns, O output columns.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from holdfast.kernels.fp8 import Quantized, Site
    from holdfast.kernels.fp8_weights import QuantizedWeights

Saved = tuple[Tensor | None, ...]
"""What a product keeps for its gradients: (x, weight) in the compute type, or both transposed in fp8 with their scales."""
ACTIVATIONS, GRADIENTS = 4, 4
MARGINS = {"activation": 2.0, "gradient": 8.0}
"""Room above the largest value of recent passes. It costs none of a floating-point type's precision, only its smallest values."""
DECAY = 0.99
"""The largest value of an earlier pass counts this much less per pass. A margin over the last pass alone is not enough: the
largest gradient of a pass can be 30 times that of the pass before, and gradients that saturate are too small."""


def compute_weight(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter in the compute type: the optimizer's copy where there is a current one."""
    copy: Tensor | None = getattr(parameter, "compute_copy", None)
    if copy is not None and copy.dtype == dtype and parameter.copied_version == parameter._version:  # type: ignore[attr-defined]
        return copy
    return parameter.detach().to(dtype)


@torch.no_grad()
def refresh_copies(parameters: Iterable[Tensor]) -> None:
    """Writes the optimizer's copies again of parameters that others have changed: initial or loaded weights, a rewind."""
    stale: list[Any] = [
        parameter
        for parameter in parameters
        if getattr(parameter, "compute_copy", None) is not None and parameter.copied_version != parameter._version  # type: ignore[attr-defined]
    ]
    if stale:
        torch._foreach_copy_([parameter.compute_copy for parameter in stale], stale)
    for parameter in stale:
        parameter.copied_version = parameter._version


class LayerScales(NamedTuple):
    """What the fp8 products of one layer use: the sites of their inputs (0-3) and output gradients (4-7), and the weights."""

    sites: "Sequence[Site]"
    weights: "Sequence[Quantized | None]"


def _kinds_and_margins() -> list[tuple[torch.dtype, float]]:
    """The fp8 type of each site of a layer, and the room above its largest value."""
    from holdfast.kernels.fp8 import E4M3, E5M2

    return [(E4M3, MARGINS["activation"])] * ACTIVATIONS + [(E5M2, MARGINS["gradient"])] * GRADIENTS


class ScaleTable:
    """The fp8 scales of all layers, and their weights in fp8.

    `weights` holds each layer's matrices in the order of use; a pair is one matrix whose rows are two parameters.

    The first pass scales dynamically. With `delays` each later one uses the largest values of recent passes; they are not part of
    the state that is saved, so a resumed run begins with a dynamic pass. A pass without gradients always scales dynamically
    and has sites of its own: an evaluation neither depends on the training passes before it nor changes those after it.
    """

    def __init__(self, weights: Sequence[Sequence[tuple[Tensor, ...]]], device: torch.device, delays: bool) -> None:
        from holdfast.kernels.fp8 import LARGEST

        # scale, factor, largest value of the pass and of recent passes: 16 bytes, to which products ask scales to be aligned
        self._rows = torch.zeros(len(weights), ACTIVATIONS + GRADIENTS, 4, device=device)
        self._evaluation_rows = torch.zeros_like(self._rows)
        units = [margin / LARGEST[kind] for kind, margin in _kinds_and_margins()]
        self._units = torch.tensor(units, device=device)
        self._parameters, self._delays, self._passes, self._training = weights, delays, 0, True
        self._weights: QuantizedWeights | None = None

    def begin_pass(self, training: bool, dtype: torch.dtype) -> None:
        """Quantizes the weights; in training turns the largest values of recent passes into scales. Values that are 0 or not
        finite leave a scale as it is."""
        self._quantize_weights(dtype)
        self._training = training
        if not training:
            self._evaluation_rows.zero_()
            return
        scale, factor, amax, peak = self._rows.unbind(-1)
        usable = (amax > 0) & amax.isfinite()
        peak.copy_(torch.where(usable, torch.maximum(amax, DECAY * peak), peak))
        scale.copy_((peak * self._units).clamp(min=1e-20))
        factor.copy_(scale.reciprocal())
        amax.zero_()
        self._passes += 1

    def _quantize_weights(self, dtype: torch.dtype) -> None:
        """All at once from the optimizer's copies, which stay where they are; without copies each product does it for itself."""
        from holdfast.kernels.fp8 import E4M3
        from holdfast.kernels.fp8_weights import QuantizedWeights

        groups = [group for layer in self._parameters for group in layer]
        parts = [[compute_weight(parameter, dtype) for parameter in group] for group in groups]
        matrices = [stacked(*copies) if len(copies) > 1 else copies[0] for copies in parts]
        kept = all(
            copy is getattr(p, "compute_copy", None)
            for g, c in zip(groups, parts, strict=True)
            for p, copy in zip(g, c, strict=True)
        )
        in_place = all(m.data_ptr() == c[0].data_ptr() for m, c in zip(matrices, parts, strict=True))
        if not (kept and in_place and all(map(QuantizedWeights.takes, matrices))):
            self._weights = None
            return
        if self._weights is None or self._weights.addresses != [matrix.data_ptr() for matrix in matrices]:
            self._weights = QuantizedWeights(matrices, E4M3)
        self._weights.update()

    def of(self, layer: int) -> LayerScales:
        from holdfast.kernels.fp8 import Site

        delayed = self._delays and self._training and self._passes > 1
        rows = (self._rows if self._training else self._evaluation_rows)[layer]
        sites = [
            Site(kind, row[0], row[1], row[2], delayed)
            for (kind, _), row in zip(_kinds_and_margins(), rows, strict=True)
        ]
        count = len(self._parameters[layer])
        weights: Sequence[Quantized | None] = [None] * count
        if self._weights is not None:
            weights = self._weights.copies[layer * count : (layer + 1) * count]
        return LayerScales(sites, weights)


def factor(x: Tensor, site: "Site | None", noted: bool = False) -> "Tensor | Quantized":
    """A matrix as a factor: as it is, or quantized at its site."""
    if site is None:
        return x
    from holdfast.kernels.fp8 import quantize_at

    return quantize_at(flat(x).contiguous(), site, noted)


def stacked(upper: Tensor, lower: Tensor) -> Tensor:
    """The rows of both, without a copy where `lower` follows `upper` in memory, as the optimizer's copies do."""
    follows = lower.data_ptr() == upper.data_ptr() + upper.nbytes and upper.is_contiguous() and lower.is_contiguous()
    if not follows or upper.untyped_storage().data_ptr() != lower.untyped_storage().data_ptr():
        return torch.cat((upper, lower))
    return upper.as_strided((len(upper) + len(lower), *upper.shape[1:]), upper.stride())


def product(
    x: "Tensor | Quantized", weight: Tensor, bias: Tensor | None, w8: "Quantized | None" = None
) -> tuple[Tensor, Saved]:
    """x · weightᵀ + bias. Weight and bias are in the compute type; `w8` is the weight in fp8, where there is one."""
    if isinstance(x, Tensor):
        return F.linear(x, weight, bias), (x, weight)
    from holdfast.kernels.fp8 import E4M3, quantize

    w8 = w8 or quantize(weight, E4M3)
    out = _scaled(x.values, w8.values, x.scale, w8.scale, weight.dtype, True, bias)
    return out, (x.transposed, x.scale, w8.transposed, w8.scale)


def input_gradient(
    dy: "Tensor | Quantized", saved: Sequence[Any], dtype: torch.dtype, onto: Tensor | None = None
) -> Tensor:
    """The gradient of x, (N, I); added to `onto` where it is given."""
    if isinstance(dy, Tensor):
        narrow = saved[1]
        return dy @ narrow if onto is None else torch.addmm(flat(onto), dy, narrow)
    dx = _scaled(dy.values, saved[2], dy.scale, saved[3], dtype, True)
    return dx if onto is None else dx.add_(flat(onto))


def weight_gradient(dy: "Tensor | Quantized", saved: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The gradient of the weight, (O, I), in the weight's own type, straight from the product."""
    if not isinstance(dy, Tensor):
        assert dy.transposed is not None
        return _scaled(dy.transposed, saved[0], dy.scale, saved[1], dtype, False)
    x = flat(saved[0])
    if dtype == torch.float32 and x.dtype != torch.float32:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return dy.T @ x


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _scaled(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, bias: Tensor | None = None
) -> Tensor:
    """a · bᵀ of fp8 matrices. `fast` accumulates in fewer bits: not for weight gradients, whose sums are long."""
    return torch._scaled_mm(a, b.T, a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)
