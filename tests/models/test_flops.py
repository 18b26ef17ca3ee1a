"""The peak behind MFU belongs to the very model of GPU that runs, or is unknown."""

from dataclasses import replace

import pytest

from holdfast.config import ModelConfig
from holdfast.models.flops import PEAKS, flops_per_token, model_name, peak_flops


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_each_gpu_has_its_own_peak(device: str, teraflops: float) -> None:
    assert peak_flops(device) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "NVIDIA H20",
        "NVIDIA A2",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_a_gpu_that_only_resembles_a_known_one_has_no_known_peak(device: str) -> None:
    assert peak_flops(device) is None


def test_every_entry_is_found_by_its_own_name() -> None:
    assert all(model_name(name) == name for name in PEAKS)


def test_a_sliding_window_costs_the_tokens_that_are_attended_to():
    whole = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    window = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, window_size=(127, 0))
    assert flops_per_token(window, 1024, 256) == flops_per_token(whole, 128, 256)
    assert flops_per_token(window, 100, 256) == flops_per_token(whole, 100, 256)
    half = replace(window, window_attn_skip_freq=(2,))
    both = flops_per_token(window, 1024, 256) + flops_per_token(whole, 1024, 256)
    assert 2 * flops_per_token(half, 1024, 256) == both
