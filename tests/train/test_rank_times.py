"""The rank that computes longest is named, in layouts whose ranks wait for each other in every step."""

import os
import time
from dataclasses import replace

import pytest

from holdfast.config import Config
from holdfast.system.journal import read_journal
from holdfast.train import rank_times
from holdfast.train.checks.preflight import resolve
from holdfast.train.loop import BatchFeed
from holdfast.train.rank_times import SHOWN_RANKS, slow_ranks_table
from holdfast.train.step import ForwardBackward
from holdfast.train.worker import run_worker
from tests.corpus import write_dataset
from tests.distributed.test_layouts import LAYOUTS, tiny
from tests.gloo import spawn_ranks
from tests.grids import mostly_slow

SLOW_RANK, SECONDS = 1, 0.15


def compute() -> None:
    until = time.thread_time() + SECONDS
    while time.thread_time() < until:
        pass


def train_with_a_slow_rank(config: Config, reason: str) -> list[str]:
    """The tables that this rank logs."""
    logged: list[str] = []
    rank_times.TABLE_SECONDS, rank_times.log = 0.0, logged.append
    if int(os.environ["RANK"]) == SLOW_RANK:
        owner, name = (BatchFeed, "training") if reason == "data" else (ForwardBackward, "_weighted_loss")
        plain, delay = getattr(owner, name), compute if reason == "compute" else lambda: time.sleep(SECONDS)

        def slow(*arguments):
            delay()
            return plain(*arguments)

        setattr(owner, name, slow)
    run_worker(config)
    return logged


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "reason"),
    mostly_slow(
        [("dp2", "data"), *((layout, "compute") for layout in ("tp2", "fsdp2", "pp2"))],
        [("tp2", "compute")],
    ),
)
def test_the_slow_rank_is_named(layout, reason, tmp_path):
    world, parallel = LAYOUTS[layout]
    config = tiny(write_dataset(tmp_path / "corpus"), tmp_path / "run")
    config = replace(
        config,
        train=replace(config.train, train_iters=5, eval_interval=3, global_batch_size=4),
        log=replace(config.log, log_interval=2),
    )
    config, _ = resolve(replace(config, parallel=replace(parallel, nproc_per_node=world)), world)
    logged, *others = spawn_ranks(world, train_with_a_slow_rank, config, reason)
    records = list(read_journal(tmp_path / "run" / "rank_times.jsonl"))
    # the first step does not count; an evaluation is logged too
    assert [(record["iteration"], record["steps"]) for record in records] == [(2, 1), (3, 1), (4, 1), (5, 1)]
    total = [sum(record["compute_ms"][rank] for record in records) for rank in range(world)]
    assert total[SLOW_RANK] > len(records) * SECONDS * 1e3
    assert total[SLOW_RANK] > total[0] + len(records) * SECONDS * 1e3 / 2
    assert any(f"rank {SLOW_RANK} on node 0" in table for table in logged) and not any(others)


def test_the_table_lists_the_slowest_ranks_first():
    table = slow_ranks_table([100.0, 101.0, 180.0, 102.0, 99.0, 260.0, 100.0, 99.5], 11, 20, 4).splitlines()
    assert table[0] == "slow ranks in iterations 11 to 20 (median of 8 ranks: 100.0 ms of compute per step)"
    assert [line.split() for line in table[1:]] == [
        "rank 5 on node 1 260.0 ms +160.0 ms (+160%)".split(),
        "rank 2 on node 0 180.0 ms +80.0 ms (+80%)".split(),
    ]
    assert slow_ranks_table([100.0, 124.0], 1, 2, 2) == ""
    assert "rank 1 on node 0" in slow_ranks_table([100.0, 126.0], 1, 2, 2)
    assert slow_ranks_table([1.0, 10.9], 1, 2, 2) == ""  # milliseconds on a CPU are noise
    many = slow_ranks_table([1.0] * 30 + [50.0] * (SHOWN_RANKS + 3), 1, 2, 8)
    assert many.endswith("and 3 more")
