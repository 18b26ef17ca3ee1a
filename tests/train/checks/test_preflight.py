"""What is refused before any rank starts: one clear line, exit code 1, nothing overwritten."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.config import config_from_tables, read_config
from holdfast.data.indexed import IndexedDatasetBuilder
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.training import train_tokenizer
from holdfast.train.checks.preflight import resolve
from holdfast.train.checks.unused_keys import unused_keys
from tests.cached_files import put_into_cache
from tests.corpus import VOCABULARY, write_dataset

PRESETS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 2 --eval-interval 0 "
    f"--no-tensorboard --vocab-size {VOCABULARY}"
).split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus", documents=30)


def refusal(*flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "train", *TINY, *flags], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("holdfast: error: "), done.stderr
    return lines[0]


def test_a_catalog_name_as_vocab_file_stands_for_the_merges_too(tmp_path, monkeypatch):
    vocab, merges = train_tokenizer(["a small text for a small tokenizer"], tmp_path, 270)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    put_into_cache(tmp_path / "cache", "gpt2", {"vocab": vocab.read_bytes(), "merges": merges.read_bytes()})
    tables = {"data": {"vocab_file": "gpt2"}, "train": {"train_iters": 2}}
    config, _ = resolve(config_from_tables(tables, "test"))
    assert 256 < config.model.vocab_size <= 270


def test_every_layout_problem_is_named_at_once(prefix):
    error = refusal("--data-path", str(prefix), "--num-attention-heads", "5", "--max-position-embeddings", "8",
                   "--micro-batch-size", "2", "--global-batch-size", "3")  # fmt: skip
    assert "hidden_size 32 is not divisible by num_attention_heads 5" in error
    assert "seq_length 16 is longer than max_position_embeddings 8" in error
    assert "global_batch_size 3 is not divisible by micro_batch_size 2" in error


def test_keys_that_apply_to_gpt_only_are_refused_for_bert(prefix):
    bert = ("--model-type", "bert", "--data-path", str(prefix))
    flags = "--position-embedding-type rope --reset-position-ids --masked-lm-prob 0 --packing best-fit --z-loss 1e-4"
    error = refusal(*bert, *flags.split())
    assert "BERT has learned positions" in error and "reset_position_ids applies to GPT" in error
    assert "masked_lm_prob 0.0 is not a fraction" in error
    assert "packing applies to GPT" in error and "z_loss applies to GPT" in error
    assert "give vocab_file" in refusal(*bert)


def test_data_that_is_missing_damaged_or_of_another_vocabulary(prefix, tmp_path):
    assert "nowhere" in refusal("--data-path", str(tmp_path / "nowhere"))
    broken = tmp_path / "broken"
    Path(f"{broken}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes())
    Path(f"{broken}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:100])
    assert "broken.idx" in refusal("--data-path", str(broken))
    builder = IndexedDatasetBuilder(tmp_path / "foreign", np.uint16)
    builder.add_document([1, 2, VOCABULARY])
    builder.finalize()
    error = refusal("--data-path", str(tmp_path / "foreign"))
    assert str(VOCABULARY) in error and "foreign" in error


def test_a_folder_that_belongs_to_another_run_is_left_alone(prefix, tmp_path):
    save = tmp_path / "run"
    command = [sys.executable, "-m", "holdfast.cli", "train", *TINY, "--data-path", str(prefix), "--save", str(save)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    before = {path: path.read_bytes() for path in save.rglob("*") if path.is_file()}
    error = refusal("--data-path", str(prefix), "--save", str(save), "--num-layers", "3", "--seed", "5")
    assert "holds another run" in error and "num_layers was 2 and is 3" in error and "seed was 1234 and is 5" in error
    assert {path: path.read_bytes() for path in save.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_resolve_and_describe_themselves(preset):
    from holdfast.train.checks.estimate import describe

    config = read_config(preset)
    if config.model.vocab_size is None:
        from dataclasses import replace

        config = replace(config, model=replace(config.model, vocab_size=4096))
    config, layout = resolve(config)
    description = describe(config, layout)
    assert f"{layout.world:,} rank" in description and "tokens per step" in description


def test_the_dry_run_of_a_large_layout_counts_as_published():
    from holdfast.train.checks.estimate import parameters_per_rank

    folder = PRESETS[0].parent
    for name, billions in (
        ("gpt2_345m", 0.355), ("gpt3_39b", 39.1), ("gpt3_310b", 310.1), ("llama2_7b", 6.74), ("llama3_1b", 1.236),
        ("llama3_8b", 8.03), ("qwen2.5_0.5b", 0.494), ("qwen3_0.6b", 0.596),
        ("qwen3_8b", 8.19), ("mistral_7b", 7.24), ("gemma2_2b", 2.61), ("pythia_160m", 0.162),
    ):  # fmt: skip
        config, layout = resolve(read_config(folder / f"{name}.toml"))
        counts = parameters_per_rank(config, layout)
        total = sum(counts) * layout.tensor * layout.shard / 1e9
        # the tied embedding is on two stages, norms on every tensor rank: within two percent of the published figure
        assert total == pytest.approx(billions, rel=0.02), name


@pytest.mark.parametrize(
    ("strategy", "state", "gradients"), [("no_shard", 12, 4), ("optim", 6, 4), ("optim_grads", 6, 1)]
)
def test_the_dry_run_counts_a_share_of_what_data_parallel_ranks_shard(strategy, state, gradients):
    from holdfast.train.checks.estimate import describe, parameters_per_rank

    config = read_config("gpt2_345m")
    parallel = replace(config.parallel, nproc_per_node=4, data_parallel_sharding_strategy=strategy)
    config, layout = resolve(replace(config, parallel=parallel))
    (count,) = parameters_per_rank(config, layout)
    memory = [f"{count * size / 2**30:.2f} GiB" for size in (state, gradients)]
    assert f"{memory[0]} weights and optimizer, {memory[1]} gradients" in describe(config, layout)


def test_zero_over_a_part_of_the_data_parallel_ranks_is_refused(prefix):
    flags = ("--use-distributed-optimizer", "--data-parallel-replicas", "2", "--nproc-per-node", "4")
    assert "optim shards over all data-parallel ranks: leave it unset" in refusal("--data-path", str(prefix), *flags)


@pytest.mark.parametrize(
    ("section", "changes", "problem"),
    [
        ("parallel", {"data_parallel_replicas": 2}, "no_shard replicates on all data-parallel ranks: leave it unset"),
        (
            "parallel",
            {"pipeline_model_parallel_size": 2},
            "global_batch_size 2 is 1 micro batch per data-parallel rank, fewer than the 2 stages of the pipeline; set it "
            "to at least 4",
        ),
        (
            "parallel",
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
            "needs a multiple of pipeline_model_parallel_size 2",
        ),
        (
            "train",
            {"rampup_batch_size": (4, 2, 9)},
            "rampup_batch_size INCREMENT 2 is not divisible by micro_batch_size 1",
        ),
        ("train", {"rampup_batch_size": (4,)}, "rampup_batch_size takes three numbers"),
        (
            "model",
            {"swiglu": True, "hidden_size": 16},
            "hidden_size 16 has no default inner width: give ffn_hidden_size",
        ),
        (
            "model",
            {"swiglu": True, "hidden_size": 48, "num_attention_heads": 3, "tensor_model_parallel_size": 3},
            "ffn_hidden_size 128 is not divisible by tensor_model_parallel_size 3",
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_its_keys(section, changes, problem):
    tables = {
        "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64},
        "data": {"seq_length": 16},
        "train": {"train_iters": 2},
        "parallel": {"nproc_per_node": 4},
    }
    tensor = changes.pop("tensor_model_parallel_size", 1)
    tables[section] |= {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    if tensor > 1:
        tables["parallel"] = {"nproc_per_node": tensor, "tensor_model_parallel_size": tensor}
    with pytest.raises(HoldfastError, match=re.escape(problem)):
        resolve(config_from_tables(tables, "test"))


def test_the_ends_of_documents_must_be_known():
    def check(**data):
        tables = {"model": {"vocab_size": 64}, "data": {"seq_length": 16, **data}, "train": {"train_iters": 2}}
        resolve(config_from_tables(tables, "test"))

    for packing in ("concatenate", "best-fit"):
        with pytest.raises(HoldfastError, match="eod_mask_loss need the end-of-document token: give the tokenizer"):
            check(packing=packing, eod_mask_loss=True)
    with pytest.raises(HoldfastError, match="reset_position_ids and reset_attention_mask need the end-of-document"):
        check(reset_position_ids=True, reset_attention_mask=True)
    check(packing="best-fit", reset_position_ids=True, reset_attention_mask=True)  # they change nothing there


def test_keys_without_an_effect_are_named():
    tables = {
        "model": {"swiglu": True, "openai_gelu": True, "rope_scaling_factor": 4.0, "bert_variant": "original"},
        "train": {"finetune": True, "fp8_recipe": "tensorwise"},
        "optimizer": {"muon_momentum": 0.9, "lr_poly_power": 1.0, "hysteresis": 3},
        "parallel": {"sequence_parallel": True},
        "log": {"wandb_entity": "us", "metrics_host": "0.0.0.0"},
    }
    found = unused_keys(config_from_tables(tables, "test"))
    expected = [key for keys in tables.values() for key in keys if key != "swiglu"]
    assert sorted(line.split()[1] for line in found) == sorted(f"--{key.replace('_', '-')}" for key in expected)
    assert "warning: --rope-scaling-factor has no effect: it needs --use-rope-scaling" in found
    for preset in PRESETS:
        assert [line for line in unused_keys(read_config(preset)) if "--finetune" not in line] == [], preset


@pytest.mark.parametrize(
    ("train", "optimizer", "unused"),
    [
        (
            {"train_iters": 9},
            {"lr_decay_samples": 8, "lr_warmup_samples": 2},
            ["lr-decay-samples", "lr-warmup-samples"],
        ),
        ({"train_samples": 9}, {"lr_decay_iters": 8}, ["lr-decay-iters"]),
        ({"train_iters": 9}, {"lr_warmup_iters": 1, "lr_warmup_fraction": 0.0}, ["lr-warmup-iters"]),
        ({"train_samples": 9}, {"lr_warmup_iters": 1, "lr_warmup_samples": 2}, ["lr-warmup-iters"]),
        ({"train_samples": 9}, {"lr_warmup_iters": 1}, []),
    ],
)
def test_lengths_in_another_unit_or_given_twice_are_named(train, optimizer, unused):
    found = unused_keys(config_from_tables({"train": train, "optimizer": optimizer}, "test"))
    assert [line.split()[1] for line in found] == [f"--{key}" for key in unused]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"window_size": (128,)}, "window_size 128: give two numbers, the second 0"),
        ({"window_size": (128, 4)}, "window_size 128 4"),
        ({"position_embedding_type": "rope", "rotary_percent": 0.1}, "rotary_percent 0.1 of a head of 16 is 1"),
        ({"use_rope_scaling": True}, "need position_embedding_type"),
        ({"window_attn_skip_freq": (2,)}, "window_attn_skip_freq needs window_size"),
        ({"window_attn_skip_freq": (0, 1), "window_size": (8, 0)}, "a 0 or 1 for each layer"),
        ({"swiglu": True, "geglu": True}, "swiglu and geglu"),
        ({"group_query_attention": True}, "group_query_attention needs num_query_groups"),
        ({"rope_low_freq_factor": 4.0}, "rope_low_freq_factor must be above 0 and below"),
        ({"model_type": "bert", "qk_layernorm": True}, "qk_layernorm applies to GPT"),
    ],
)
def test_options_that_no_model_has_are_refused(model, problem):
    from holdfast.config import ModelConfig, model_problems

    tiny = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    (found,) = model_problems(ModelConfig(**tiny, **model))
    assert problem in found
    assert model_problems(ModelConfig(**tiny, window_size=(4095, 0))) == []


def test_context_parallelism_is_refused_with_what_to_use_instead(prefix):
    error = refusal("--data-path", str(prefix), "--context-parallel-size", "2", "--nproc-per-node", "2")
    assert "context_parallel_size > 1 is not supported; use sequence_parallel" in error
