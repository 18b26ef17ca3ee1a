"""Tensor parallelism: each layer's matrices and the vocabulary sharded over ranks as DTensors.

`linear_qkv` and `linear_fc1` are sharded by rows (heads, inner width), `linear_proj` and `linear_fc2` by columns, so that a layer
needs one all-reduce in attention and one in the MLP. Sequence parallelism shards the residual stream between them over tokens;
the all-reduces become all-gather and reduce-scatter.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional as F

from holdfast.models.dropout import DropoutKeys
from holdfast.models.loss import VocabShard


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shards every layer, the embedding and the head of `model` over the ranks of `mesh`."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    for layer in transformer_layers(model):
        parallelize_module(layer, mesh, _layer_plan(layer, stream, sequence_parallel))
    plan: dict[str, ParallelStyle] = {}
    names = dict(model.named_modules())
    if "embedding.word_embeddings" in names:
        plan["embedding.word_embeddings"] = ShardedLookup(stream)
    if sequence_parallel:
        for name in ("embedding.position_embeddings", "embedding.tokentype_embeddings"):
            if name in names:
                plan[name] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        for name in ("embedding.layernorm", "decoder.final_layernorm", "encoder.final_layernorm"):
            if name in names:
                plan[name] = SequenceParallel(use_local_output=True)
    if "output_layer" in names:
        plan["output_layer"] = ColwiseParallel() if isinstance(names["output_layer"], nn.Linear) else ShardRows()
    parallelize_module(model, mesh, plan)
    model.vocab_shard = build_vocab_shard(model, mesh, stream)  # type: ignore[assignment]
    model.sequence_shards = mesh.size() if sequence_parallel else 1  # type: ignore[assignment]
    if model.config.hidden_dropout and not sequence_parallel:  # type: ignore[union-attr]
        model.dropout_keys = DropoutKeys()  # type: ignore[assignment]


class ShardRows(ParallelStyle):
    """Shards the parameters of a module by rows, for a module whose forward is not used."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(rows))
        return module


class ShardedLookup(ShardRows):
    """An embedding sharded by rows: each rank looks up the tokens of its own rows, and the sum over the ranks is given back.

    The gradient is that of the own rows. RowwiseParallel makes one of all rows on every rank.
    """

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self._output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)

        def look_up(tokens: Tensor) -> Tensor:
            weight: Tensor = module.weight.to_local()  # type: ignore[union-attr, operator]
            rows = tokens - device_mesh.get_local_rank() * len(weight)
            others = (rows < 0) | (rows >= len(weight))
            found = F.embedding(rows.masked_fill(others, 0), weight).masked_fill(others[..., None], 0)
            partial = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[self._output]).to_local()

        module.forward = look_up
        return module


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    stack: Any = getattr(model, "decoder", None) or model.encoder
    return list(stack.layers.values())


def _layer_plan(layer: nn.Module, stream: Placement, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "self_attention.linear_qkv": ColwiseParallel(input_layouts=stream),
        "self_attention.linear_proj": RowwiseParallel(output_layouts=stream),
        "mlp.linear_fc2": RowwiseParallel(output_layouts=stream),
    }
    for name, _ in layer.named_modules():
        if name.startswith("mlp.linear_fc1"):
            plan[name] = ColwiseParallel(input_layouts=stream)
        # Norms of queries and keys see this rank's heads (dimension 1), the others its tokens (dimension 1 as well).
        if name.endswith(("q_layernorm", "k_layernorm")) or (sequence_parallel and name.endswith("layernorm")):
            plan[name] = SequenceParallel(use_local_output=True)
    return plan


def build_vocab_shard(model: nn.Module, mesh: DeviceMesh, stream: Placement) -> VocabShard:
    """This rank's rows of the vocabulary and the collectives of the loss over them."""
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def reduced(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, operation, group=group)
        return x

    def gather_hidden(x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [stream], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def gather_tokens(x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [stream], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Replicate()])

    def copy_hidden(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def local_rows(matrix: Tensor) -> Tensor:
        assert isinstance(matrix, DTensor)
        return matrix.to_local()

    rows = 0
    for name, parameter in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
            rows = parameter.shape[0] // size
    return VocabShard(
        first_row=rank * rows,
        reduce_max=lambda x: reduced(x, dist.ReduceOp.MAX),
        reduce_sum=lambda x: reduced(x, dist.ReduceOp.SUM),
        gather_hidden=gather_hidden,
        gather_tokens=gather_tokens,
        copy_hidden=copy_hidden,
        local_rows=local_rows,
    )


def reduce_partial_gradients(parameters: list[nn.Parameter]) -> None:
    """Sums gradients of which each rank has a partial sum (norms under sequence parallelism, norms of queries and keys)."""
    for parameter in parameters:
        gradient = parameter.grad
        if (
            isinstance(gradient, DTensor)
            and isinstance(parameter, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor on this rank."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def is_sharded_over(tensor: Tensor, axis: str) -> bool:
    """Whether a tensor is sharded over the ranks of a mesh axis."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(name == axis and not p.is_replicate() for name, p in zip(names, tensor.placements, strict=True))


def load_shard(parameter: Tensor, value: Tensor) -> None:
    """Copies a whole value into a parameter, or this rank's shard of it."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shard = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
            parameter._local_tensor.copy_(shard._local_tensor)
        else:
            parameter.copy_(value)
