"""The one way tests start ranks: real processes with a real gloo group, forked from a server that has torch loaded already."""

import contextlib
import multiprocessing
import os
import queue
import random
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "tests.gloo"]
)


def free_port() -> int:
    """A port below those that the system hands out by itself: nothing else takes it before its user listens on it."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(max(1024, lowest - 20_000), lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _rank(
    function: Callable[..., Any], rank: int, world: int, port: int, arguments: tuple[Any, ...], results: Any
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", HOLDFAST_SUPERVISED="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, function(*arguments)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise


def spawn_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
    """Runs `function(*arguments)` on `world` ranks; returns their results by rank, or fails with the first traceback."""
    results = _CONTEXT.Queue()
    port = free_port()
    ranks = [
        _CONTEXT.Process(target=_rank, args=(function, rank, world, port, arguments, results), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + timeout
        while len(found) < world:
            try:
                rank_number, worked, value = results.get(timeout=1)
            except queue.Empty:
                died = [number for number, rank in enumerate(ranks) if rank.exitcode and number not in found]
                assert not died, f"ranks {died} died without a word"
                assert time.monotonic() < deadline, f"ranks {sorted(set(range(world)) - set(found))} are still at work"
                continue
            if not worked:
                raise AssertionError(f"rank {rank_number}:\n{value}")
            found[rank_number] = value
    finally:
        for rank in ranks:
            if len(found) < world:
                rank.kill()
            rank.join(30)
    return [found[rank] for rank in range(world)]
