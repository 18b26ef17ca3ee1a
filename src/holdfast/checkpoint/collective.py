"""What the ranks tell each other about a checkpoint: JSON values, gathered by all. Works without a process group (one rank).

Nothing is pickled, not even between ranks: torch's object collectives would.
"""

from typing import Any

import orjson
import torch
import torch.distributed as dist

from holdfast.system.errors import HoldfastError


def rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    content = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    if not (dist.is_available() and dist.is_initialized()):
        return [orjson.loads(content)]
    device = _device_of(group)
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    everyone = [torch.zeros_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine, group=group)
    return [
        orjson.loads(content.cpu().numpy()[:length].tobytes())
        for content, length in zip(everyone, lengths, strict=True)
    ]


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on all ranks what went wrong on any, the first rank's trouble first. One call per rank, whatever happened."""
    # an unexpected error is told too, so that nobody waits for a rank that has gone
    message = None if error is None else f"{error}" if isinstance(error, HoldfastError) else repr(error)
    messages = gather(message, group)
    if error is not None and not isinstance(error, HoldfastError):
        raise error
    for rank, told in enumerate(messages):
        if told is not None:
            raise HoldfastError(told if len(messages) == 1 else f"{told} (on rank {rank})")


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    backends = dist.get_backend_config(group)
    if "nccl" in backends and "gloo" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
