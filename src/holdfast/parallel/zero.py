"""ZeRO-1 and ZeRO-2: every replica holds all parameters, and updates the rows of them that are its own.

The rows (dimension 0) of a parameter are cut as torch.chunk cuts them. A replica's own rows are a DTensor in the parameter's
memory, so that optimizers, checkpoints and snapshots treat them as they treat shards of FSDP2; moments exist for these rows only.
A step sums gradients by reduce-scatter, updates the own rows, and gathers the rows of the other replicas.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from holdfast.parallel.data import GradientSum, make_buckets
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import local

IN_FLIGHT = 2
"""Buckets that collectives work on at the same time; more of them would hold all gradients or weights a second time."""


def updated_parameters(stages: list[nn.Module], grid: Grid) -> dict[nn.Parameter, nn.Parameter]:
    """What the optimizer of this rank updates, by parameter: the parameter itself, or this replica's rows of it."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    if not grid.layout.shards_updates:
        return {parameter: parameter for parameter in parameters}
    mesh = _rows_mesh(grid)
    return {parameter: _own_rows(parameter, grid, mesh) for parameter in parameters}


def _rows_mesh(grid: Grid) -> DeviceMesh:
    """The mesh tensor × replica: tensor parallelism cuts a parameter first, and its replicas cut what is left."""
    ranks = grid.mesh.mesh[grid.index("pipeline"), :, 0, :].T.contiguous()
    groups = [grid.group("tensor"), grid.group("replica")]
    return DeviceMesh.from_group(groups, grid.device.type, mesh=ranks, mesh_dim_names=("tensor", "replica"))


def _own_rows(parameter: nn.Parameter, grid: Grid, mesh: DeviceMesh) -> nn.Parameter:
    whole = local(parameter.detach())
    size = -(-len(whole) // grid.layout.replica)
    first = grid.index("replica") * size
    rows = whole[min(first, len(whole)) : first + size]
    placements: tuple[Placement, ...] = (Shard(0),)
    if isinstance(parameter, DTensor):
        placements = (*parameter.placements, Shard(0))
    shape, stride = parameter.shape, parameter.stride()
    on = mesh if isinstance(parameter, DTensor) else grid.mesh["replica"]
    own = nn.Parameter(DTensor.from_local(rows, on, placements, run_check=False, shape=shape, stride=stride))
    own.shard_of = parameter  # type: ignore[attr-defined]
    return own


class GradientScatter(GradientSum):
    """Sums gradients over replicas; each gets the sums of its own rows, as the gradients of the parameters that it updates.

    `every_pass`: after each backward pass instead of after the last one, so that a rank never holds all gradients (ZeRO-2).
    """

    def __init__(
        self, parameters: list[nn.Parameter], updated: Mapping[nn.Parameter, nn.Parameter], grid: Grid, every_pass: bool
    ) -> None:
        super().__init__(parameters, grid.group("replica"))
        self._updated, self._every_pass, self._replicas = updated, every_pass, grid.layout.replica
        self._sums: list[Tensor | None] = []
        self._placements: dict[nn.Parameter, tuple[Placement, ...]] = {}

    def expect(self, passes: int) -> None:
        self._sums = [None] * len(self._buckets)
        self._plan_sends(1 if self._every_pass else passes, passes if self._every_pass else 1)

    def wait(self) -> None:
        super().wait()
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            assert sums is not None
            parts = sums.split([_padded_numel(parameter, self._replicas) for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                self._set_gradient(parameter, part)
        self._sums = []

    def _set_gradient(self, parameter: nn.Parameter, part: Tensor) -> None:
        own: DTensor = self._updated[parameter]  # type: ignore[assignment]
        rows = local(own)
        placements = (*self._placements.get(parameter, own.placements[:-1]), Shard(0))
        gradient = part[: rows.numel()].view_as(rows)
        own.grad = DTensor.from_local(
            gradient, own.device_mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
        )

    def _start(self, index: int) -> Callable[[], None]:
        """Starts the reduce-scatter of a bucket and frees its gradients; the returned function adds up the sums."""
        if len(self._sent) == IN_FLIGHT:
            self._sent.popleft()()
        gradients = []
        for parameter in self._buckets[index]:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                self._placements[parameter] = gradient.placements  # a partial sum over tensor-parallel ranks
            gradients.append(local(gradient))
        flat = torch._chunk_cat(gradients, 0, self._replicas)
        sums = flat.new_empty(flat.shape[1])
        work = dist.reduce_scatter_tensor(sums, flat.flatten(), group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            earlier = self._sums[index]
            self._sums[index] = sums if earlier is None else earlier.add_(sums)

        return finish


class RowGather:
    """Gathers the rows that the other replicas have updated, bucket by bucket."""

    def __init__(self, updated: Mapping[nn.Parameter, nn.Parameter], grid: Grid) -> None:
        self._updated = updated if grid.layout.shards_updates else {}
        self._group, self._replicas = grid.group("replica"), grid.layout.replica
        self._buckets = make_buckets(list(self._updated))

    @torch.no_grad()
    def __call__(self) -> None:
        sent: deque[Callable[[], None]] = deque()
        for bucket in self._buckets:
            if len(sent) == IN_FLIGHT:
                sent.popleft()()
            sent.append(self._start(bucket))
        while sent:
            sent.popleft()()

    def _start(self, bucket: list[nn.Parameter]) -> Callable[[], None]:
        sizes = [_padded_numel(parameter, self._replicas) for parameter in bucket]
        own = local(bucket[0]).new_zeros(sum(sizes))
        for part, parameter in zip(own.split(sizes), bucket, strict=True):
            rows = local(self._updated[parameter])
            part[: rows.numel()].copy_(rows.flatten())
        every = own.new_empty(self._replicas * len(own))
        work = dist.all_gather_into_tensor(every, own, group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            for parts, parameter in zip(every.view(self._replicas, -1).split(sizes, dim=1), bucket, strict=True):
                whole = local(parameter)
                whole.copy_(parts.reshape(-1)[: whole.numel()].view_as(whole))

        return finish


def _padded_numel(parameter: nn.Parameter, replicas: int) -> int:
    """Elements of one replica's rows, where each has as many as the first."""
    whole = local(parameter)
    return -(-len(whole) // replicas) * math.prod(whole.shape[1:])
