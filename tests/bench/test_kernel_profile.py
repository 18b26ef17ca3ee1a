"""Kernels are counted under their kind, by names that a profile of an H200 shows; bounds follow from the configuration."""

from dataclasses import replace

import pytest

from holdfast.bench.kernel_profile import kernel_bounds, kind_of
from holdfast.config import Config, DataConfig, ModelConfig, TrainConfig
from holdfast.system.errors import UsageError
from holdfast.train.model_families import max_predictions


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "product"),
        ("nvjet_sm90_qrtst_256x128_128x4_1x2_h_bz_coopA_TNT", "product"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float>", "product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("_norm_backward", "norm and activation"),
        ("_gelu_forward", "norm and activation"),
        ("_cross_entropy", "loss"),
        ("_adamw_step", "optimizer"),
        ("_quantize", "fp8 conversion"),
        ("_gather_qkv", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::(anonymous namespace)::sum_and_scatter<float, long>", "other"),
    ],
)
def test_a_kernel_counts_under_its_kind(kernel, kind):
    assert kind_of(kernel) == kind


def test_bounds_are_work_divided_by_rate():
    config = Config(
        model=ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16, vocab_size=50257),
        data=DataConfig(seq_length=1024),
        train=TrainConfig(micro_batch_size=32),
    )
    bounds = kernel_bounds(config, 720e12, 4.2e12)
    assert bounds["product"] == pytest.approx(6 * (24 * 12 * 1024**2 + 50304 * 1024) * 32768 / 720e12 * 1e3)
    assert bounds["attention"] == pytest.approx(12 * 24 * 1024 * 1024 * 32768 / 2 / 720e12 * 1e3)
    assert bounds["loss"] == pytest.approx(32768 * 50304 * 4 / 4.2e12 * 1e3)
    assert kernel_bounds(config, 1440e12, 4.2e12)["product"] == pytest.approx(bounds["product"] / 2)
    narrow = kernel_bounds(replace(config, train=replace(config.train, fp8=True)), 720e12, 4.2e12)
    assert narrow["product"] == pytest.approx(bounds["product"] - 6 * 11 * 12 * 1024**2 * 32768 / 720e12 * 1e3)


def test_bounds_of_bert_and_llama():
    bert = Config(
        model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=1, vocab_size=1000, model_type="bert"),
        data=DataConfig(seq_length=128),
        train=TrainConfig(micro_batch_size=4),
    )
    bounds, tokens, predicted = kernel_bounds(bert, 1e12, 1e12), 4 * 128, max_predictions(bert) / 128
    assert bounds["attention"] == pytest.approx(12 * 2 * 64 * 128 * tokens / 1e9)  # every token attends to all
    assert bounds["loss"] == pytest.approx(tokens * predicted * 1024 * 4 / 1e9)
    head = predicted * (1024 * 64 + 64**2)
    assert bounds["product"] == pytest.approx(6 * (2 * 12 * 64**2 + head) * tokens / 1e9, rel=1e-4)
    llama = replace(
        bert,
        model=replace(
            bert.model, model_type="gpt", num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=160,
            swiglu=True, position_embedding_type="rope", untie_embeddings_and_output_weights=True,
        ),
    )  # fmt: skip
    bounds = kernel_bounds(llama, 1e12, 1e12)
    assert bounds["norm and activation"] == pytest.approx(2 * tokens * 2 * (16 * 64 + 8 * 160) / 1e9)
    assert bounds["copies"] == pytest.approx(2 * tokens * 2 * 2 * 16 * (8 + 6) / 1e9)
    weights = 2 * 64 * (16 * 12 + 3 * 160) + 2 * 1024 * 64
    assert bounds["optimizer"] == pytest.approx(30 * weights / 1e9)


def test_a_profile_needs_a_gpu():
    import torch

    from holdfast.bench.train import TrainBench, run

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="needs a CUDA device"):
        run(TrainBench(profile=True, against=()))
