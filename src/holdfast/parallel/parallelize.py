"""Applies a layout to a model, in a fixed order: tensor parallel → recompute → compile → FSDP2 → memory for the weights.

Modules are built on the meta device and sharded before they get memory, so that no rank ever holds more than its shards. Initial
weights are a step of their own: a run that resumes loads its weights instead.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast.models.fused import can_use_fp8, fp8_weights, why_not_fused
from holdfast.models.products import ScaleTable
from holdfast.parallel.data import apply_fsdp
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import apply_tensor_parallel, load_shard, transformer_layers
from holdfast.system.progress import log


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    sequence_parallel: bool,
    recompute: str,
    compiled: bool,
    fp8: bool,
    dtype: torch.dtype,
    delayed: bool = False,
) -> None:
    """Shards a model on the meta device for this rank of the grid. Its weights have memory and no values afterwards."""
    if grid.layout.tensor > 1:
        apply_tensor_parallel(model, grid.mesh["tensor"], sequence_parallel)
    layers: list[Any] = transformer_layers(model)
    if recompute != "none":
        for layer in layers:
            recompute_in_backward(layer.self_attention if recompute == "selective" else layer)
    if compiled:
        reason = _why_not_fused(layers, grid, recompute, dtype)
        for layer in layers:
            layer.fused = reason is None
            if layer.fused:
                layer.plain = torch.compile(layer.plain, dynamic=False)
            else:
                layer.compile(dynamic=False)
        if reason is not None and grid.device.type == "cuda" and grid.rank == 0:
            log(f"layers are compiled by torch, not fused: {reason}")
        model.vocab_shard = replace(model.vocab_shard, compiled=True)  # type: ignore[type-var]
    if grid.layout.shard > 1:
        axes = ("replica", "shard") if grid.layout.replica > 1 else ("shard",)
        apply_fsdp(model, grid.mesh[axes], dtype)
    model.to_empty(device=grid.device)
    if fp8 and all(getattr(layer, "fused", False) for layer in layers):
        _use_fp8(model, layers, grid, delayed)  # after the weights have their memory


def initialize(model: nn.Module, initial: Callable[[str, torch.Size], Tensor]) -> None:
    """Gives every weight its initial value, or this rank's shard of it."""
    for name, parameter in model.named_parameters():
        load_shard(parameter, initial(name, parameter.shape))


def _why_not_fused(layers: list[Any], grid: Grid, recompute: str, dtype: torch.dtype) -> str | None:
    """Why torch compiles the layers instead of models/fused.py computing them; None if it can."""
    if recompute == "selective":
        return "--recompute-granularity selective keeps parts that fused functions compute together"
    if grid.layout.shard > 1:
        return "FSDP2: they are not tested with gathered weights"
    return next((reason for layer in layers if (reason := why_not_fused(layer, grid.device, dtype))), None)


def _use_fp8(model: Any, layers: list[Any], grid: Grid, delayed: bool) -> None:
    """fp8 products in all layers but the whole model's first and last. Scales are never delayed where a resumed run has to repeat
    bit for bit, or where the passes of several micro batches overlap."""
    delays = delayed and grid.layout.pipeline == 1 and not torch.are_deterministic_algorithms_enabled()
    chosen = [layer for layer in layers if can_use_fp8(layer, grid.device) and not _at_an_end(model, layer)]
    if chosen:
        model.fp8_scales = ScaleTable([fp8_weights(layer) for layer in chosen], grid.device, delays)
    for index, layer in enumerate(chosen):
        layer.fp8 = functools.partial(model.fp8_scales.of, index)


def _at_an_end(model: Any, layer: nn.Module) -> bool:
    """Whether this is the whole model's first or last layer, whose products are the most sensitive to rounding."""
    layers = (getattr(model, "decoder", None) or model.encoder).layers
    ends = ("0", str(model.config.num_layers - 1))
    return any(number in layers and layers[number] is layer for number in ends)


def recompute_in_backward(module: nn.Module) -> None:
    """Keeps only the module's inputs and recomputes the rest in backward."""
    plain = module.forward
    draws = any(getattr(part, "p", 0.0) or getattr(part, "dropout", 0.0) for part in module.modules())

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(plain, *arguments, use_reentrant=False, preserve_rng_state=draws, **keywords)
        return plain(*arguments, **keywords)

    module.forward = forward
