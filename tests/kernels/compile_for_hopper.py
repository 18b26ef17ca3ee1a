"""Compiles every training kernel for Hopper with the arguments that its function passes; needs no GPU.

`python -m tests.kernels.compile_for_hopper` calls the functions with tensors on the CPU, compiles instead of launching, and
prints a line per kernel. The interpreter accepts more than the compiler does, so this finds what the other tests cannot.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", BF16: "bf16", torch.int64: "i64", torch.int32: "i32",
    E4M3: "fp8e4nv", E5M2: "fp8e5",
}  # fmt: skip


def signature_of(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants, and which arguments are multiples of 16, as a launch would find them."""
    types, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        types[parameter.name] = "fp32"
        if isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, int):
            types[parameter.name] = "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def compile_instead(kernel: Any, *values: Any, grid: Any, warmup: bool, num_warps: int = 4, **named: Any) -> None:
    arguments = dict(zip(kernel.arg_names, values, strict=False)) | named
    types, constants, attributes = signature_of(kernel, arguments)
    source = ASTSource(kernel, types, constants, attributes)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    print(kernel.__name__, flush=True)


def main() -> None:
    from holdfast.kernels import (
        activation,
        activation_fp8,
        adamw,
        attention,
        column_sums,
        cross_entropy,
        fp8,
        fp8_weights,
        norm,
    )
    from holdfast.kernels import short_attention as short

    JITFunction.run = compile_instead

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=BF16)

    def site(kind: torch.dtype, delayed: bool = True) -> fp8.Site:
        return fp8.Site(kind, torch.ones(()), torch.ones(()), torch.zeros(()), delayed)

    x, wide, weight, amax = random(128, 256), random(128, 512), torch.ones(256), torch.zeros(())
    for centred in (True, False):
        for at in (None, site(E4M3, False), site(E4M3)):
            norm.norm_forward(x, weight, weight if centred else None, 1e-5, centred, x, weight, at)
        rows = torch.ones(128)
        norm.norm_backward(x, x, x, weight, rows if centred else None, rows)
        norm.norm_transposed(x, weight, weight if centred else None, rows if centred else None, rows, site(E4M3))
    norm.add_bias(x, x, weight)
    for tanh in (True, False):
        activation.gelu_forward(x, tanh, amax)
        activation.gelu_backward(x, x, tanh, amax)
        activation_fp8.gelu_forward_fp8(x, tanh, site(E4M3))
        activation_fp8.gelu_backward_fp8(x, x, tanh, site(E5M2))
    activation.swiglu_forward(wide, amax)
    activation.swiglu_backward(x, wide, amax)
    activation_fp8.swiglu_forward_fp8(wide, site(E4M3))
    activation_fp8.swiglu_backward_fp8(x, wide, site(E5M2))
    column_sums.column_sums(x)
    q, k, angles = random(2, 8, 64, 64), random(2, 2, 64, 64), random(1, 1, 64, 64)
    for rotary in (None, (angles, angles)):
        attention.gather_gradients(q, k, k, rotary, amax)
        attention.gather_gradients_fp8(q, k, k, rotary, site(E5M2))
    attention.rotate_(random(2, 64, 12 * 64), 4, 64, (angles, angles))
    heads, sums, bias = (k, k, k), (random(2, 2, 1, 64).float(),) * 3, torch.zeros(2, 1, 1, 64, dtype=BF16)
    for given, causal in ((bias, False), (None, True)):
        _, normalizers = short.short_attention(*heads, given, causal, torch.empty_like(k))
        short.short_attention_backward(k, *heads, given, causal, normalizers, heads, sums)
    cross_entropy.cross_entropy_(random(4, 50304), torch.zeros(4, dtype=torch.int64), torch.ones(4), 50257)
    fp8.quantize(x, E4M3)
    fp8.quantize_at(x, site(E5M2), noted=False)
    fp8_weights.QuantizedWeights([x, wide], E4M3).update()
    table, counts = torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    one, numbers = torch.ones(()), torch.zeros(4)
    for number in (one, one.double()):
        adamw.begin_step(number, torch.zeros(1), numbers, 1.0, 1.0, (0.9, 0.95))
    adamw.adamw_step(table, one, counts, numbers, 1.0, (0.9, 0.95), 1e-8, BF16)


if __name__ == "__main__":
    main()
