"""Tensor-parallel ranks drop different elements of what each holds a shard of, and the same of what each holds a copy of."""

from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from holdfast.checkpoint import open_checkpoint
from holdfast.config import Config, DataConfig, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from holdfast.models.dropout import Dropout
from holdfast.parallel.layout import layout_of
from holdfast.parallel.mesh import Grid, build_grid
from holdfast.parallel.tensor import local
from holdfast.train.checks.preflight import resolve
from holdfast.train.loop import seed_dropout
from holdfast.train.model_families import build_stages, initialize_stages
from holdfast.train.worker import join_ranks, run_worker
from tests.corpus import VOCABULARY, write_dataset
from tests.gloo import spawn_ranks

pytestmark = pytest.mark.distributed

MODELS = {
    "gpt": ModelConfig(),
    "bert": ModelConfig(model_type="bert"),
    "original bert": ModelConfig(model_type="bert", bert_variant="original"),
}
TP2 = ParallelConfig(tensor_model_parallel_size=2, nproc_per_node=2)


def tiny(model: str, parallel: ParallelConfig, *, dropout: float = 0.2, recompute: str = "none") -> Config:
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    return Config(
        model=replace(MODELS[model], **shape, hidden_dropout=dropout, attention_dropout=dropout),
        data=DataConfig(seq_length=16, num_workers=0),
        train=TrainConfig(micro_batch_size=2, recompute_granularity=recompute, compile=False),  # type: ignore[arg-type]
        parallel=parallel,
    )


def join() -> Grid:
    device = torch.device("cpu")
    join_ranks(device, timedelta(minutes=2))
    return build_grid(layout_of(TP2, 2), device)


def build(config: Config, grid: Grid) -> Any:
    """This rank's model in its place."""
    (model,) = build_stages(config, grid, VOCABULARY)
    initialize_stages(config, [model], VOCABULARY)
    return model.train()


def masks(config: Config) -> dict[str, list[np.ndarray]]:
    """What is dropped in two forward passes of one step, by the kind of place."""
    grid = join()
    model = build(config, grid)
    found: dict[str, list[np.ndarray]] = defaultdict(list)

    def note(kind: str) -> Any:
        return lambda module, inputs, out: found[kind].append(((out == 0) & (inputs[0] != 0)).numpy())

    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(note("embedding" if "embedding" in name else "hidden"))
    plain = F.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        state = torch.get_rng_state()
        tokens = key.shape[2]
        shares = plain(query, key, torch.eye(tokens).expand(*key.shape[:2], tokens, tokens), **options)
        found["attention"].append((shares == 0).tril().numpy() if options["is_causal"] else (shares == 0).numpy())
        torch.set_rng_state(state)
        return plain(query, key, value, **options)

    F.scaled_dot_product_attention = attention
    seed_dropout(config, 3, grid, [model])
    tokens = torch.arange(32).view(2, 16) % VOCABULARY
    with torch.no_grad():
        for _ in range(2):
            model(tokens)
    return dict(found)


def alike(ranks: list[dict[str, list[np.ndarray]]], kind: str) -> set[bool]:
    left, right = (rank[kind] for rank in ranks)
    assert len(left) == len(right) and all(0.05 < mask.mean() < 0.4 for mask in left)
    assert len({mask.tobytes() for mask in left}) == len(left), "a mask was drawn twice"
    return {np.array_equal(a, b) for a, b in zip(left, right, strict=True)}


@pytest.mark.parametrize("model", MODELS)
def test_copies_are_dropped_alike_and_shards_are_not(model: str) -> None:
    ranks = spawn_ranks(2, masks, tiny(model, TP2))
    found = {kind: alike(ranks, kind) for kind in ("embedding", "hidden", "attention")}
    assert found == {"embedding": {True}, "hidden": {True}, "attention": {False}}


def test_with_sequence_parallelism_everything_is_a_shard() -> None:
    ranks = spawn_ranks(2, masks, tiny("gpt", replace(TP2, sequence_parallel=True)))
    found = {kind: alike(ranks, kind) for kind in ("embedding", "hidden", "attention")}
    assert found == {"embedding": {False}, "hidden": {False}, "attention": {False}}


def gradients(sequence_parallel: bool) -> list[list[np.ndarray]]:
    """Of all parameters, for each way to recompute."""
    grid = join()
    found = []
    for recompute in ("none", "selective", "full"):
        config = tiny("gpt", replace(TP2, sequence_parallel=sequence_parallel), recompute=recompute)
        model = build(config, grid)
        seed_dropout(config, 3, grid, [model])
        tokens = torch.arange(32).view(2, 16) % VOCABULARY
        losses = [model((tokens + offset) % VOCABULARY, labels_BT=tokens) for offset in range(2)]
        for loss in losses:  # both forward passes come first, as in a pipeline
            loss.sum().backward()
        found.append([local(p.grad).numpy() for p in model.parameters()])
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputing_draws_the_same_masks(sequence_parallel: bool) -> None:
    for kept, *recomputed in spawn_ranks(2, gradients, sequence_parallel):
        for again in recomputed:
            for left, right in zip(kept, again, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def draws_keys() -> list[bool]:
    grid = join()
    return [build(tiny("gpt", TP2, dropout=dropout), grid).dropout_keys is not None for dropout in (0.0, 0.2)]


def test_without_dropout_no_keys_are_drawn() -> None:
    assert spawn_ranks(2, draws_keys) == [[False, True]] * 2


def train(prefix: Path, save: Path, steps: int) -> dict[str, bytes]:
    config = tiny("gpt", TP2)
    config = replace(
        config,
        data=replace(config.data, data_path=(str(prefix),), split="90,10,0"),
        train=replace(config.train, train_iters=steps, global_batch_size=4, eval_interval=0, save=str(save)),
        optimizer=OptimizerConfig(lr=4e-3, lr_decay_style="constant"),
        log=LogConfig(tensorboard=False),
    )
    config, _ = resolve(config, 2)
    spawn_ranks(2, run_worker, config)
    with open_checkpoint(save) as checkpoint:
        return {name: np.array(checkpoint.tensor(name)).tobytes() for name in checkpoint.tensors}


def test_a_resumed_run_with_dropout_ends_bit_identical(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "corpus")
    straight = train(prefix, tmp_path / "straight", 6)
    train(prefix, tmp_path / "resumed", 3)
    assert train(prefix, tmp_path / "resumed", 6) == straight
