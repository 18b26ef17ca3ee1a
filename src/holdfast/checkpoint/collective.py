"""Collectives of JSON values and of errors. They also work without a process group (one rank).

Nothing is pickled, not even between ranks: torch's object collectives would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
    own = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    everyone = [torch.zeros_like(own) for _ in lengths]
    dist.all_gather(everyone, own, group=group)
    return [
        orjson.loads(content.cpu().numpy()[:length].tobytes())
        for content, length in zip(everyone, lengths, strict=True)
    ]


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on all ranks what went wrong on any, the first rank's error first. Every rank calls it, with or without an error."""
    # Unexpected errors are included, so that no rank waits for one that is gone.
    message = None if error is None else f"{error}" if isinstance(error, HoldfastError) else repr(error)
    messages = gather(message, group)
    if error is not None and not isinstance(error, HoldfastError):
        raise error
    for rank, found in enumerate(messages):
        if found is not None:
            raise HoldfastError(found if len(messages) == 1 else f"{found} (on rank {rank})")


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block that succeeds on all ranks or raises on all of them. Every rank must enter it."""
    trouble: Exception | None = None
    try:
        yield
    except Exception as error:
        trouble = error
    agree(trouble, group)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    backends = dist.get_backend_config(group)
    if "nccl" in backends and "gloo" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
