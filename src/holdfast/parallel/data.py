"""Data parallelism: gradients of replicas added up in buckets while backward still runs, or weights sharded by FSDP2.

Losses are already divided by the whole batch, so gradients are summed. FSDP2 averages instead (only NCCL can be told not to), and
whoever runs the passes multiplies the loss by the number of ranks first.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from holdfast.parallel.tensor import local, transformer_layers

BUCKET_BYTES = 32 << 20


class GradientSum:
    """All-reduces replicated gradients over a group, bucket by bucket, starting as soon as a bucket is complete.

    `expect(n)` says after how many backward passes a gradient is final; `wait()` ends the exchange. Buckets follow the
    parameters backwards, about as backward reaches them, and are exchanged in that fixed order on all ranks.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group, self._parameters = group, parameters
        self._buckets = _make_buckets(list(reversed(parameters)))
        self._home = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._passes = 1
        self._arrived: dict[int, int] = {}
        self._missing: list[int] = []
        self._next = 0
        self._flying: list[tuple[Any, Tensor, list[Tensor]]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def expect(self, passes: int) -> None:
        self._passes, self._next, self._arrived = passes, 0, {}
        self._missing = [len(bucket) for bucket in self._buckets]

    def wait(self) -> None:
        """Sends what is left (parameters that got no gradient count as zero) and brings every sum home."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        self._next = len(self._buckets)
        for work, flat, gradients in self._flying:
            work.wait()
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in _split(flat, gradients)])
        self._flying = []

    def _on_gradient(self, parameter: Tensor) -> None:
        count = self._arrived[id(parameter)] = self._arrived.get(id(parameter), 0) + 1
        if count != self._passes:
            return
        self._missing[self._home[id(parameter)]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: list[nn.Parameter]) -> None:
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(parameter.grad) for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._flying.append((work, flat, gradients))


def _make_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = local(parameter).numel() * 4
        if room < size or not buckets:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= size
    return buckets


def _split(flat: Tensor, gradients: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat.split([gradient.numel() for gradient in gradients]), gradients, strict=True))


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 over `mesh` (shard, or replica × shard): each layer a unit, everything else with the root."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in transformer_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
