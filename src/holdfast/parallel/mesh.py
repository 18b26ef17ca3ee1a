"""The ranks of a run as a DeviceMesh, and this rank's position in it."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.parallel.layout import AXES, ParallelLayout


@dataclass(frozen=True)
class Grid:
    """The layout, its mesh, and this rank's device and position."""

    layout: ParallelLayout
    mesh: DeviceMesh
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank's number in the whole run."""
        return dist.get_rank()

    def index(self, axis: str) -> int:
        """This rank's position on an axis."""
        return int(self.mesh.get_local_rank(axis))

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on these axes only."""
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        return self.mesh[axes]._flatten("_".join(axes)).get_group()

    @property
    def data_rank(self) -> int:
        """This rank's position among the data-parallel ranks."""
        return self.index("replica") * self.layout.shard + self.index("shard")


def pick_device() -> torch.device:
    """This rank's CUDA device, chosen by LOCAL_RANK; the CPU where there is none."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def build_grid(layout: ParallelLayout, device: torch.device) -> Grid:
    mesh = init_device_mesh(device.type, layout.sizes(), mesh_dim_names=AXES)
    grid = Grid(layout, mesh, device)
    grid.group("replica", "shard")  # all ranks must create the group, in the same order
    return grid
