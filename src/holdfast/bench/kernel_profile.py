"""Where the GPU time of a training step goes, by kind of kernel, and how far each kind is from its bound.

A bound is the least time that the kind's FLOPs or bytes take at rates measured on the same device: a large bf16 product, a large
copy. Bytes count every tensor of the fused layers that must cross memory, once.
"""

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from holdfast.bench.harness import Row
from holdfast.config import Config
from holdfast.models.flops import flops_per_token, matrix_weights
from holdfast.models.layers import Shape
from holdfast.parallel.layout import padded_vocab_size
from holdfast.train.model_families import family_of

if TYPE_CHECKING:
    from holdfast.bench.contenders import HoldfastContender

STEPS = 3
# Kind → kernel names, the first match decides. Products are cuBLAS's, attention is cuDNN's or flash attention.
KINDS = {
    "attention": r"sdpa|flash|fmha|cudnn::fusion|_short_attention",
    "product": r"nvjet|gemm|cutlass|cublas|xmma",
    "fp8 conversion": r"_quantize|_largest",
    "loss": r"_cross_entropy|softmax|nll_loss",
    "optimizer": r"_adamw|multi_tensor_apply|FusedAdam",
    "norm and activation": r"_norm_|_gelu_|_swiglu_|_add_bias|_column_sums|layer_norm|GammaBeta|triton_",
    "copies": r"_gather_qkv|_rotate|Memcpy|Memset|copy|Cat",
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), "other")


def profile_step(contender: "HoldfastContender", batches: list[Any], config: Config, step_seconds: float) -> list[Row]:
    """A row per kind: milliseconds per step, launches, share of the step, the bound and the distance from it.

    `step_seconds` is a step without the profiler, which slows the host down; what its kernels do not fill is idle."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for batch in batches[:STEPS]:
            contender.step(batch, lambda phase: None)
        torch.cuda.synchronize()
    spent, launches = Counter[str](), Counter[str]()
    for event in recorded.events() or []:
        if event.device_type.name == "CUDA" and not event.name.startswith("Optimizer.step"):
            spent[kind_of(event.name)] += event.device_time_total / STEPS / 1e3
            launches[kind_of(event.name)] += 1
    bounds = kernel_bounds(config, *measured_rates())
    rows = [
        _row(kind, spent[kind], launches[kind] // STEPS, step_seconds, bounds.get(kind))
        for kind, _ in spent.most_common()
    ]
    return [*rows, _row("idle", max(0.0, step_seconds * 1e3 - spent.total()), 0, step_seconds, None)]


def _row(kind: str, ms: float, launches: int, step_seconds: float, bound: float | None) -> Row:
    distance = f"{ms / bound:.2f} ×" if bound else ""
    share = f"{ms / step_seconds / 1e3:.1%}"
    return {
        "kind": kind, "ms": round(ms, 2), "launches": launches, "share": share,
        "bound ms": round(bound, 2) if bound else "", "ms / bound": distance,
    }  # fmt: skip


def measured_rates() -> tuple[float, float]:
    """FLOP/s of an 8,192³ bf16 product, and bytes/s of a 2 GiB copy (read and written bytes)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 8192**3 / _seconds(lambda: a @ b), 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _seconds(action: Any, calls: int = 10) -> float:
    for _ in range(3):
        action()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(calls):
        action()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / calls / 1e3


def kernel_bounds(config: Config, flops: float, bandwidth: float) -> dict[str, float]:
    """Milliseconds per step that each kind takes at least, at `flops` FLOP/s and `bandwidth` bytes/s."""
    model, shape = config.model, Shape.of(config.model)
    assert model.vocab_size is not None
    padded, predicted = padded_vocab_size(model.vocab_size, model, 1), family_of(config).predicted
    tokens, hidden = config.train.micro_batch_size * config.data.seq_length, model.hidden_size
    products: float = 6 * matrix_weights(model, padded, predicted) * tokens
    attention = flops_per_token(model, config.data.seq_length, padded, predicted) * tokens - products
    if model.model_type == "gpt":  # causal: half of the scores
        attention /= 2
    if config.train.fp8:  # twice the rate, in all layers but the first and the last
        inner = 6 * matrix_weights(model, padded, 0.0) * tokens
        products -= inner * max(0, model.num_layers - 2) / model.num_layers / 2
    bounds = {"product": products / flops, "attention": attention / flops}
    qkv, rotated = model.num_attention_heads + 2 * shape.groups, model.num_attention_heads + shape.groups
    # Values per token and layer that are read or written, of 2 bytes. Norms: the sum of two and its norm; from the gradients of
    # both and the sum, the gradient of the sum. GELU and its gradient; SwiGLU of two. q/k/v gradients into one buffer.
    norm_values, activation_values = 2 * (4 + 4) * hidden, (8 if model.gated else 5) * shape.ffn
    copied = 2 * shape.head * (qkv + (rotated if model.position_embedding_type == "rope" else 0))
    parameters = matrix_weights(model, padded) + padded * hidden * model.untie_embeddings_and_output_weights
    bounds |= {
        "norm and activation": 2 * tokens * model.num_layers * (norm_values + activation_values) / bandwidth,
        "copies": 2 * tokens * model.num_layers * copied / bandwidth,
        "loss": 2 * tokens * predicted * 2 * padded / bandwidth,
        "optimizer": 30 * parameters / bandwidth,  # 16 bytes read, 14 written per weight
    }
    return {kind: seconds * 1e3 for kind, seconds in bounds.items()}
