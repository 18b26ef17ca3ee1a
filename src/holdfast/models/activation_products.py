"""Products with GELU in their epilogue, by the optional package quack-kernels: the MLP's inner values cross memory once less.

The activation is not kept for backward: the product that gives its gradient computes it again on the way, for the weight
gradient.

Shapes: N tokens, H hidden, F columns of the MLP.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.kernels import installed
from holdfast.kernels.trials import agree, kernel_milliseconds
from holdfast.system.progress import log

PACKAGE = "quack-kernels"
GELU = "gelu_tanh_approx"
SEPARATE, QUACK = "separate", "quack"


def usable() -> bool:
    return installed(PACKAGE)


def linear_gelu(x_NH: Tensor, weight_FH: Tensor, bias_F: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x · weightᵀ + bias, its GELU in the tanh form)."""
    from quack.gemm_interface import gemm_act

    inner, active = gemm_act(x_NH, weight_FH.T, bias=bias_F, activation=GELU, tuned=False)
    return cast(Tensor, inner), cast(Tensor, active)


def gelu_gradient(dy_NH: Tensor, weight_HF: Tensor, inner_NF: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of `inner` where that of y = GELU(inner) · weightᵀ is dy, GELU(inner))."""
    from quack.gemm_interface import gemm_dact

    dinner, active = gemm_dact(dy_NH, weight_HF, inner_NF, activation=GELU, tuned=False)
    return cast(Tensor, dinner), cast(Tensor, active)


def milliseconds(rows: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Time of the two products and what surrounds them, by separate kernels, and in the epilogue if that computes the same."""
    from holdfast.kernels.activation import gelu_backward, gelu_forward
    from holdfast.kernels.column_sums import column_sums

    x, dy = (torch.randn(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    upper, lower = (
        torch.randn(*size, dtype=dtype, device=device) * hidden**-0.5 for size in ((ffn, hidden), (hidden, ffn))
    )
    bias = torch.randn(ffn, dtype=dtype, device=device)

    def separate() -> tuple[Tensor, ...]:
        inner = F.linear(x, upper, bias)
        active = gelu_forward(inner, tanh=True)
        return active, *gelu_backward(dy @ lower, inner, tanh=True)

    def together() -> tuple[Tensor, ...]:
        inner, active = linear_gelu(x, upper, bias)
        dinner, _ = gelu_gradient(dy, lower, inner)
        return active, dinner, column_sums(dinner)

    wanted = separate()
    found = {SEPARATE: kernel_milliseconds(separate)}
    try:
        if agree(together(), wanted):
            found[QUACK] = kernel_milliseconds(together)
        else:
            log("products with GELU by quack are not used: their results differ from torch's")
    except Exception as error:  # of any kind: it compiles for the device at hand
        log(f"products with GELU by quack are not used: {' '.join(str(error).split())[:200]}")
    return found
