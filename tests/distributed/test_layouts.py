"""The same configuration gives the same losses and gradient norms in every layout (real gloo ranks)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from holdfast.config import Config, DataConfig, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from holdfast.models.gpt import GPT
from holdfast.parallel.tensor import apply_tensor_parallel, local
from holdfast.system.journal import read_journal
from holdfast.train.checks.preflight import resolve
from holdfast.train.worker import run_worker
from tests.corpus import VOCABULARY, write_dataset
from tests.gloo import spawn_ranks
from tests.grids import mostly_slow

pytestmark = pytest.mark.distributed

SHARDED = "optim_grads_params"
LAYOUTS = {
    "tp2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "tp2-sequence": (2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
    "dp2": (2, ParallelConfig()),
    "fsdp2": (2, ParallelConfig(data_parallel_sharding_strategy=SHARDED)),
    "pp2-uneven": (2, ParallelConfig(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1)),
    "pp2-interleaved": (
        2,
        ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    ),
    "pp4": (4, ParallelConfig(pipeline_model_parallel_size=4)),
    "tp2-pp2": (4, ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "tp2-pp2-sequence": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
    ),
    "tp2-dp2": (4, ParallelConfig(tensor_model_parallel_size=2)),
    "tp2-fsdp2": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, data_parallel_sharding_strategy=SHARDED),
    ),
    "pp2-dp2": (4, ParallelConfig(pipeline_model_parallel_size=2)),
    "pp2-fsdp2": (4, ParallelConfig(pipeline_model_parallel_size=2, data_parallel_sharding_strategy=SHARDED)),
    "tp2-zero1": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, data_parallel_sharding_strategy="optim"),
    ),
    "pp2-interleaved-zero2": (
        4,
        ParallelConfig(
            pipeline_model_parallel_size=2,
            num_virtual_stages_per_pipeline_rank=2,
            data_parallel_sharding_strategy="optim_grads",
        ),
    ),
    "hybrid": (4, ParallelConfig(data_parallel_sharding_strategy=SHARDED, data_parallel_replicas=2)),
    "tp2-pp2-dp2": (8, ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
}


def tiny(prefix: Path, save: Path, **model: object) -> Config:
    return Config(
        model=ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=VOCABULARY, **model),
        data=DataConfig(data_path=(str(prefix),), seq_length=16, split="90,10,0", num_workers=0),
        train=TrainConfig(
            train_iters=12, micro_batch_size=2, global_batch_size=8, eval_interval=6, eval_iters=2, save=str(save)
        ),
        optimizer=OptimizerConfig(
            lr=4e-3, lr_decay_style="constant", lr_warmup_iters=4, weight_decay=0.1, clip_grad=0.5
        ),
        log=LogConfig(tensorboard=False),
    )


def train_on(world: int, config: Config, parallel: ParallelConfig) -> list[dict[str, float]]:
    config = replace(config, parallel=replace(parallel, nproc_per_node=world))
    config, _ = resolve(config, world)
    spawn_ranks(world, run_worker, config)
    assert config.train.save is not None
    return list(read_journal(Path(config.train.save) / "metrics.jsonl"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def single_process(prefix, tmp_path_factory):
    """The run on one process that every layout is compared with."""
    return train_on(1, tiny(prefix, tmp_path_factory.mktemp("alone") / "run"), ParallelConfig())


def assert_same_curve(found, expected, tolerance=1e-5):
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert (key in ours) == (key in theirs)
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance), (key, theirs["iteration"])


def test_the_run_learns(single_process):
    assert single_process[0]["loss"] > 4.0
    assert single_process[-1]["loss"] < single_process[0]["loss"] - 0.2


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, ["dp2", "fsdp2", "pp2-interleaved"]))
def test_losses_and_norms_are_those_of_one_process(layout, single_process, prefix, tmp_path):
    world, parallel = LAYOUTS[layout]
    assert_same_curve(train_on(world, tiny(prefix, tmp_path / "run"), parallel), single_process)


def with_muon(prefix: Path, save: Path) -> Config:
    config = tiny(prefix, save)
    return replace(config, optimizer=replace(config.optimizer, optimizer="muon", lr=3e-3))


@pytest.fixture(scope="module")
def muon_alone(prefix, tmp_path_factory):
    return train_on(1, with_muon(prefix, tmp_path_factory.mktemp("muon") / "run"), ParallelConfig())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2-fsdp2", "tp2-zero1"])
def test_muon_gives_the_curve_of_one_process(layout, muon_alone, prefix, tmp_path):
    world, parallel = LAYOUTS[layout]
    assert muon_alone[-1]["loss"] < muon_alone[0]["loss"] - 0.2
    assert_same_curve(train_on(world, with_muon(prefix, tmp_path / "run"), parallel), muon_alone)


def with_packing(prefix: Path, save: Path) -> Config:
    config = tiny(prefix, save)
    optimizer = replace(config.optimizer, z_loss=0.01, lr_mult="embedding=0.5,layers.3=2")
    return replace(config, data=replace(config.data, packing="best-fit"), optimizer=optimizer)


@pytest.fixture(scope="module")
def packed_alone(prefix, tmp_path_factory):
    return train_on(1, with_packing(prefix, tmp_path_factory.mktemp("packed") / "run"), ParallelConfig())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2-sequence", "pp2"])
def test_packed_documents_with_z_loss_and_rates_by_name_give_the_curve_of_one_process(
    layout, packed_alone, prefix, tmp_path
):
    world, parallel = LAYOUTS[layout]
    assert packed_alone[-1]["loss"] < packed_alone[0]["loss"] - 0.2
    assert all(0 < record["padding_share"] < 0.05 for record in packed_alone)
    found = train_on(world, with_packing(prefix, tmp_path / "run"), parallel)
    assert_same_curve(found, packed_alone)
    for record, alone in zip(found, packed_alone, strict=True):
        assert record["lm_loss"] + record["z_loss"] == pytest.approx(record["loss"])
        assert record["z_loss"] == pytest.approx(alone["z_loss"], rel=1e-5) and 0.1 < record["z_loss"] < 0.3


@pytest.mark.slow
def test_options_of_llama_qwen_mistral_and_gemma_in_two_layouts_at_once(prefix, tmp_path):
    options = dict(
        swiglu=True, position_embedding_type="rope", normalization="RMSNorm", num_query_groups=2, disable_bias_linear=True,
        untie_embeddings_and_output_weights=True, add_qkv_bias=True, qk_layernorm=True, kv_channels=16, window_size=(5, 0),
        use_rope_scaling=True, original_max_position_embeddings=8, window_attn_skip_freq=(1, 0, 1, 1), apply_layernorm_1p=True,
        post_block_norm=True, scale_embeddings=True, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    expected = train_on(1, tiny(prefix, tmp_path / "alone", **options), ParallelConfig())
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    assert_same_curve(train_on(4, tiny(prefix, tmp_path / "parallel", **options), parallel), expected)


def compare_gradients_of_the_embedding(sequence: bool) -> None:
    """Compares this rank's rows with the same rows of the gradient without tensor parallelism."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    tokens = torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    for untied in (False, True):
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
        config = ModelConfig(**sizes, untie_embeddings_and_output_weights=untied)
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            models.append(GPT(config, vocab_size=VOCABULARY, padded_vocab_size=98, max_positions=16))
        apply_tensor_parallel(models[1], mesh, sequence)
        for model in models:
            model(tokens[:, :-1], tokens[:, 1:]).sum().backward()
        whole, shard = (model.embedding.word_embeddings.weight for model in models)
        assert shard.grad.placements == shard.placements
        expected = whole.grad.chunk(2)[mesh.get_local_rank()]
        torch.testing.assert_close(local(shard.grad), expected, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.parametrize("sequence", [False, True])
def test_a_tensor_parallel_rank_has_the_gradient_of_its_own_rows_of_the_embedding(sequence):
    spawn_ranks(2, compare_gradients_of_the_embedding, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2-fsdp2", "tp2-zero1"])
def test_a_separate_output_matrix_gives_the_curve_of_one_process(layout, prefix, tmp_path):
    options = {"untie_embeddings_and_output_weights": True}
    expected = train_on(1, tiny(prefix, tmp_path / "alone", **options), ParallelConfig())
    world, parallel = LAYOUTS[layout]
    assert_same_curve(train_on(world, tiny(prefix, tmp_path / "parallel", **options), parallel), expected)
