"""ZeRO-1 and ZeRO-2: replication's results with a share of its optimizer state (and gradients) on each rank (real gloo ranks)."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from holdfast import checkpoint, convert
from holdfast.config import Config, OptimizerConfig, ParallelConfig
from holdfast.parallel import data
from holdfast.parallel.layout import layout_of
from holdfast.parallel.mesh import build_grid
from holdfast.parallel.tensor import local
from holdfast.train.checks.preflight import resolve
from holdfast.train.loop import TrainingRun
from holdfast.train.model_families import BatchFeed
from holdfast.train.timeline import StartTimeline
from holdfast.train.worker import join_ranks
from tests.corpus import VOCABULARY, write_dataset
from tests.distributed.test_layouts import assert_same_curve, tiny, train_on
from tests.gloo import spawn_ranks
from tests.grids import mostly_slow

pytestmark = pytest.mark.distributed

SMALL_BUCKET = 8192


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


def short_run(prefix: Path, strategy: str, optimizer: str, ranks: int) -> Config:
    config = tiny(prefix, Path())
    config = replace(
        config,
        model=replace(config.model, num_layers=2, hidden_size=27, num_attention_heads=3),  # ranks get unequal rows
        train=replace(
            config.train, save=None, train_iters=3, micro_batch_size=1, global_batch_size=2 * ranks, eval_interval=0
        ),
        # The gradient of a key's bias is zero but for rounding: a small epsilon would make steps of that noise.
        optimizer=OptimizerConfig(optimizer=optimizer, lr=4e-3, lr_decay_style="constant", adam_eps=1e-3),
        parallel=ParallelConfig(data_parallel_sharding_strategy=strategy, nproc_per_node=ranks),
    )
    return resolve(config, ranks)[0]


class Rank:
    """One rank with a run, and the largest number of gradient bytes that its backward passes hold at a time."""

    def __init__(self, config: Config) -> None:
        grid = build_grid(layout_of(config.parallel), torch.device("cpu"))
        self.run = TrainingRun(config, grid, BatchFeed(config, grid), StartTimeline())
        self.parameters = [p for stage in self.run.stages for p in stage.parameters()]
        self.most_gradients = 0
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._measure())

    def _measure(self) -> None:
        held = sum(local(p.grad).nbytes for p in self.parameters if p.grad is not None)
        self.most_gradients = max(self.most_gradients, held)

    def state(self) -> checkpoint.State:
        return checkpoint.State(self.run.stages, self.run.optimizer, replica_group=self.run.grid.group("replica"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's weights and rows of the moments, by name."""
        return {item.name: item.local.clone() for item in self.state().items()}

    def optimizer_bytes(self) -> int:
        return sum(item.local.nbytes for item in self.state().items() if item.name.startswith("optimizer."))


def trained(config: Config) -> Rank:
    rank = Rank(config)
    rank.run.train()
    return rank


def rows_of(replicated: dict[str, torch.Tensor], name: str, state: checkpoint.State) -> torch.Tensor:
    """What replication has where a rank has a shard."""
    box = next(item.box for item in state.items() if item.name == name)
    slices = tuple(slice(begin, begin + size) for begin, size in zip(box.offset, box.shape, strict=True))
    return replicated[name][slices]


def compare(rank: Rank, replicated: dict[str, torch.Tensor], tolerance: float) -> None:
    found, state = rank.tensors(), rank.state()
    assert found.keys() == replicated.keys()
    for name, value in found.items():
        expected = rows_of(replicated, name, state)
        assert torch.allclose(value, expected, rtol=tolerance, atol=tolerance), name


def rank_of_comparison(prefix: Path, folder: Path, optimizer: str, ranks: int) -> list[tuple[str, int, int, int]]:
    join_ranks(torch.device("cpu"), timedelta(minutes=4))
    data.BUCKET_BYTES = SMALL_BUCKET
    replicas = trained(short_run(prefix, "no_shard", optimizer, ranks))
    expected = replicas.tensors()
    checkpoint.save(folder / "no_shard", 3, replicas.state())
    measured = []
    for strategy in ("optim", "optim_grads"):
        rank = trained(short_run(prefix, strategy, optimizer, ranks))
        compare(rank, expected, 1e-6)
        measured.append((strategy, rank.optimizer_bytes(), replicas.optimizer_bytes(), rank.most_gradients))
        # A replicated state loads into rows, and rows into a replicated state.
        checkpoint.load_newest(folder / "no_shard", rank.state())
        compare(rank, expected, 0.0)
        checkpoint.save(folder / strategy, 3, rank.state())
        with torch.no_grad():
            for item in replicas.state().items():
                item.local.zero_()
        checkpoint.load_newest(folder / strategy, replicas.state())
        compare(replicas, expected, 0.0)
    dist.barrier()
    dist.destroy_process_group()
    return measured


@pytest.mark.parametrize(("optimizer", "ranks"), mostly_slow([("adam", 2), ("lamb", 3), ("muon", 3)], [("adam", 2)]))
def test_weights_and_moments_are_those_of_replication_at_a_share_of_its_memory(prefix, tmp_path, optimizer, ranks):
    largest = SMALL_BUCKET + 128 * 27 * 4  # the embedding fills a bucket alone
    for measured in spawn_ranks(ranks, rank_of_comparison, prefix, tmp_path, optimizer, ranks):
        assert [strategy for strategy, *_ in measured] == ["optim", "optim_grads"]
        for strategy, own, replicated, gradients in measured:
            assert own < 1.1 * replicated / ranks, strategy
            assert (gradients <= largest) == (strategy == "optim_grads"), (strategy, gradients)


@pytest.mark.slow
def test_a_run_continues_under_every_strategy_and_converts(prefix, tmp_path):
    """From replicas to ZeRO-1, ZeRO-2, FSDP2 and back, with other numbers of ranks: the losses of one process."""
    plan = [(2, "no_shard"), (2, "optim"), (4, "optim_grads"), (2, "optim_grads_params"), (1, "no_shard"), (4, "optim")]
    config, save = tiny(prefix, tmp_path / "run"), tmp_path / "run"
    found = []
    for done, (ranks, strategy) in enumerate(plan, start=1):
        here = replace(config, train=replace(config.train, train_iters=2 * done))
        found = train_on(ranks, here, ParallelConfig(data_parallel_sharding_strategy=strategy))
    assert_same_curve(found, train_on(1, tiny(prefix, tmp_path / "alone"), ParallelConfig()))
    converted = load_file(convert(save, tmp_path / "hf", to="hf") / "model.safetensors")
    with checkpoint.open_checkpoint(save) as saved:
        rows = saved.tensor("model.embedding.word_embeddings.weight", rows=(0, VOCABULARY))
        assert np.array_equal(converted["transformer.wte.weight"].numpy(), rows)
