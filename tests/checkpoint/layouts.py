"""One small model in every layout; its tensors are a function of their names, so the expected values need no file."""

import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.checkpoint import State

WIDTH = 6
ROWS = 13
STAGES = 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Blocks under global names; the head shares the embedding's weight wherever both are on one rank."""

    def __init__(self, blocks: range = range(STAGES), rows: int = ROWS, embedding: bool = True) -> None:
        super().__init__()
        if embedding:
            self.embedding = torch.nn.Embedding(rows, WIDTH)
        self.blocks = torch.nn.ModuleDict({str(number): Block() for number in blocks})
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        if embedding:
            self.head = torch.nn.Linear(WIDTH, rows, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def build(layout: str, rows: int = ROWS) -> State:
    """The state of this rank in a layout: single, ddp, fsdp, tp, tp+ddp, tp+fsdp, pp, pp+ddp."""
    torch.manual_seed(0)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    padded = {"embedding.weight": ROWS}
    if layout.startswith("pp"):
        stages = 2
        per_stage = world // stages
        stage = rank // per_stage
        blocks = range(stage * STAGES // stages, (stage + 1) * STAGES // stages)
        return with_optimizer(Model(blocks, rows), padded)
    model: torch.nn.Module = Model(rows=rows)
    if layout == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif layout == "fsdp":
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
    elif layout.startswith("tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "tp+fsdp":
            fully_shard(model, mesh=mesh["dp"])
    return with_optimizer(model, padded)


def with_optimizer(model: torch.nn.Module, padded: dict[str, int]) -> State:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return State(model, torch.optim.AdamW(groups, lr=0.5), padded_rows=padded)


def take_a_step(state: State) -> None:
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The expected tensor of this name: a row depends on the name and its number alone, not on how many rows there are."""
    rows = []
    for row in range(shape[0] if shape else 1):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{row}".encode()))
        rows.append(torch.randint(-1000, 1000, shape[1:], generator=generator).to(dtype))
    return torch.stack(rows) if shape else rows[0]


def fill(state: State, seed: int) -> None:
    with torch.no_grad():
        for item in state.items():
            item.local.copy_(expected(item, seed))


def expected(item, seed: int) -> torch.Tensor:
    box = tuple(slice(o, o + s) for o, s in zip(item.box.offset, item.box.shape, strict=True))
    return whole(item.name, item.box.global_shape, item.local.dtype, seed)[box]


def assert_filled(state: State, seed: int, rows: int | None = None) -> None:
    """Every tensor has its expected value; rows beyond `rows` of a padded tensor are zero."""
    for item in state.items():
        value = expected(item, seed)
        if rows is not None and "embedding" in item.name and item.box.shape:
            value[max(0, rows - item.box.offset[0]) :] = 0
        assert torch.equal(item.local, value), item.name
