"""Applies a layout to a model, in a fixed order: tensor parallel → recompute → compile → FSDP2 → initial weights.

Modules are built on the meta device, sharded, and then filled with this rank's shard of each weight, so that no rank ever holds
more than its shards.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast.models.fused import can_fuse, can_use_fp8
from holdfast.parallel.data import apply_fsdp
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import apply_tensor_parallel, load_shard, transformer_layers


def parallelize(
    model: nn.Module,
    grid: Grid,
    initial: Callable[[str, torch.Size], Tensor],
    *,
    sequence_parallel: bool,
    recompute: str,
    compiled: bool,
    fp8: bool,
    dtype: torch.dtype,
) -> None:
    """Shards a model on the meta device for this rank of the grid and initializes its weights."""
    if grid.layout.tensor > 1:
        apply_tensor_parallel(model, grid.mesh["tensor"], sequence_parallel)
    if recompute != "none":
        for layer in transformer_layers(model):
            recompute_in_backward(layer.self_attention if recompute == "selective" else layer)  # type: ignore[arg-type]
    if compiled:
        # Recomputation does not reach what fused functions keep for backward; they are not tested with FSDP2's gathered weights.
        fuses = recompute == "none" and grid.layout.shard == 1
        for layer in transformer_layers(model):
            if fuses and can_fuse(layer, grid.device, dtype):
                layer.fused = True  # type: ignore[assignment]
                layer.fp8 = fp8 and can_use_fp8(layer, grid.device) and not _at_an_end(model, layer)  # type: ignore[assignment]
                layer.plain = torch.compile(layer.plain, dynamic=False)  # type: ignore[assignment,arg-type]
            else:
                layer.compile(dynamic=False)
        model.vocab_shard = replace(model.vocab_shard, compiled=True)  # type: ignore[type-var]
    if grid.layout.shard > 1:
        axes = ("replica", "shard") if grid.layout.replica > 1 else ("shard",)
        apply_fsdp(model, grid.mesh[axes], dtype)
    model.to_empty(device=grid.device)
    for name, parameter in model.named_parameters():
        load_shard(parameter, initial(name, parameter.shape))


def _at_an_end(model: Any, layer: nn.Module) -> bool:
    """Whether this is the whole model's first or last layer, whose products are the most sensitive to rounding."""
    layers = (getattr(model, "decoder", None) or model.encoder).layers
    ends = ("0", str(model.config.num_layers - 1))
    return any(number in layers and layers[number] is layer for number in ends)


def recompute_in_backward(module: nn.Module) -> None:
    """Keeps only the module's inputs and recomputes the rest in backward."""
    plain = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(plain, *arguments, use_reentrant=False, **keywords)
        return plain(*arguments, **keywords)

    module.forward = forward
