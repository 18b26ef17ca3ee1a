"""Real gloo ranks for a test: forked from a server that has imported torch once, so that a world starts in a fraction of
a second."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "holdfast.checkpoint.writing",
        "holdfast.checkpoint.loading",
    ]
)


def run_world(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(rank, *arguments)` on every rank of a world of its own; the ranks' results, or the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(rank, size, folder, answers, function, arguments), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        results: dict[int, Any] = {}
        troubles = []
        try:
            for _ in ranks:
                rank, result, trouble = answers.get()
                results[rank] = result
                if trouble:
                    troubles.append(f"rank {rank}:\n{trouble}")
                    break
        finally:
            for rank in ranks:
                if troubles:
                    rank.kill()
                rank.join(timeout)
        assert not troubles, "\n".join(troubles)
        return [results[rank] for rank in range(size)]


def _rank(
    rank: int, size: int, folder: str, answers: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        result = function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        answers.put((rank, result, None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
        raise
