"""BERT with LAMB gives the same curves in every layout: both losses, both accuracies, each a mean over the global batch."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config import Config, DataConfig, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from tests.corpus import write_sentences
from tests.distributed.test_layouts import SHARDED, train_on
from tests.grids import mostly_slow

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "dp2": (2, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
    "fsdp2": (2, ParallelConfig(data_parallel_sharding_strategy=SHARDED)),
    "tp2-sequence-pp2": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
    ),
    "tp2-sequence-fsdp2": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, data_parallel_sharding_strategy=SHARDED),
    ),
    "pp2-interleaved-dp2": (
        4,
        ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    ),
}
CURVES = ("loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "grad_norm")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("sentences"), documents=10)


def tiny_bert(corpus: tuple[Path, Path], save: Path, **model: object) -> Config:
    vocab, prefix = corpus
    return Config(
        model=ModelConfig(model_type="bert", num_layers=4, hidden_size=32, num_attention_heads=4, **model),
        data=DataConfig(
            data_path=(str(prefix),), seq_length=32, split="80,20,0", num_workers=0,
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocab),
        ),
        train=TrainConfig(
            train_iters=6, micro_batch_size=2, global_batch_size=8, eval_interval=3, eval_iters=2, save=str(save)
        ),
        optimizer=OptimizerConfig(
            optimizer="lamb", lr=2e-3, lr_decay_style="polynomial", lr_warmup_fraction=0.34, adam_eps=1e-6
        ),
        log=LogConfig(tensorboard=False),
    )  # fmt: skip


@pytest.fixture(scope="module")
def single_process(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    variants = ("megatron", "original")
    return {
        name: train_on(1, tiny_bert(corpus, folder / name, bert_variant=name), ParallelConfig()) for name in variants
    }


def assert_same_curves(found, expected, tolerance=1e-5):
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            if key.removeprefix("validation_") in CURVES:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=1e-6), (key, theirs["iteration"])


@pytest.mark.parametrize("variant", ["megatron", "original"])
def test_metrics_hold_both_tasks_and_their_sum(single_process, variant):
    for record in single_process[variant]:
        assert record["loss"] == pytest.approx(record["mlm_loss"] + record["nsp_loss"])
        assert 0 <= record["mlm_accuracy"] <= 1 and record["nsp_accuracy"] * 8 == pytest.approx(
            round(record["nsp_accuracy"] * 8)
        )
        assert record["sequences_per_s"] * 32 == pytest.approx(record["tokens_per_s"])
    assert "validation_mlm_accuracy" in single_process[variant][2]


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["dp2", "tp2-sequence-pp2"]))
def test_curves_are_those_of_one_process(layout, single_process, corpus, tmp_path):
    world, parallel = LAYOUTS[layout]
    assert_same_curves(train_on(world, tiny_bert(corpus, tmp_path / "run"), parallel), single_process["megatron"])


@pytest.mark.parametrize("layout", mostly_slow(["tp2-sequence-pp2", "fsdp2"], ["fsdp2"]))
def test_curves_of_the_original_variant_are_those_of_one_process(layout, single_process, corpus, tmp_path):
    world, parallel = LAYOUTS[layout]
    config = tiny_bert(corpus, tmp_path / "run", bert_variant="original")
    assert_same_curves(train_on(world, config, parallel), single_process["original"])


def test_without_the_binary_head_only_masked_tokens_are_trained(corpus, tmp_path):
    config = tiny_bert(corpus, tmp_path / "run", bert_no_binary_head=True)
    config = replace(config, train=replace(config.train, train_iters=2, eval_interval=0))
    for record in train_on(1, config, ParallelConfig()):
        assert record["loss"] == record["mlm_loss"] and "nsp_loss" not in record
