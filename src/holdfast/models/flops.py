"""How much arithmetic a token costs, and how much the device could do: the two numbers behind TFLOP/s and MFU.

Counted as everybody in the field counts: 6 FLOPs per weight and token for forward and backward (the embedding look-up is
free, the output matrix costs where a token is predicted), plus attention scores and values over the full sequence or the
sliding window (as PaLM counts: causality is not deducted).
"""

import re

from holdfast.config import ModelConfig
from holdfast.models.layers import Shape

# Dense peak of the tensor cores in FLOP/s (bf16; fp16 where there is no bf16), by model name as `model_name` writes it.
# Source: the vendors' data sheets, without sparsity. A model that is not listed has no known peak: a near name is no guess.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H100": 989.4e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835.5e12,
    "H800": 989.4e12,
    "H800 PCIE": 756e12,
    "A100": 312e12,
    "A100 PCIE": 312e12,
    "A800": 312e12,
    "A800 PCIE": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "V100 PCIE": 112e12,
    "V100S PCIE": 130e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
NOT_THE_MODEL = re.compile(r"NVIDIA|GEFORCE|TESLA|SXM\d?|HBM\d?E?|\d+GB")


def matrix_weights(config: ModelConfig, padded_vocab_size: int, predicted: float = 1.0) -> int:
    """Weights that take part in a matrix product for each token, if the output's do for the share `predicted` of them."""
    shape = Shape.of(config)
    attention = config.hidden_size * shape.head * (2 * config.num_attention_heads + 2 * shape.groups)
    mlp = config.hidden_size * shape.ffn * (3 if config.gated else 2)
    head = padded_vocab_size * config.hidden_size
    if config.model_type == "bert":
        head += config.hidden_size**2
    return config.num_layers * (attention + mlp) + int(predicted * head)


def flops_per_token(config: ModelConfig, seq_length: int, padded_vocab_size: int, predicted: float = 1.0) -> int:
    """Forward and backward FLOPs of one token."""
    windows = [config.layer_window(number) for number in range(config.num_layers)]
    attended = sum(min(seq_length, window[0] + 1) if window else seq_length for window in windows)
    attention = 12 * config.num_attention_heads * Shape.of(config).head * attended
    return 6 * matrix_weights(config, padded_vocab_size, predicted) + attention


def model_name(device_name: str) -> str:
    """`A100 PCIE` of `NVIDIA A100-PCIE-40GB`: the name without vendor, memory and socket."""
    words = re.split(r"[\s-]+", device_name.upper())
    return " ".join(word for word in words if word and not NOT_THE_MODEL.fullmatch(word))


def peak_flops(device_name: str) -> float | None:
    """The device's dense peak by its name, or None if it is not known (a share of a GPU, a laptop's model)."""
    return PEAKS.get(model_name(device_name))
