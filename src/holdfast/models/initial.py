"""Starting weights, decided by (seed, parameter name) alone: the same in every layout, on every device, in every order."""

import hashlib
import math

import torch
from torch import Tensor

from holdfast.config import ModelConfig

VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int, vocab_size: int) -> Tensor:
    """Normal with `init_method_std`, scaled down on the outputs of blocks; norms multiply by 1, biases 0, padded tokens 0."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.full(shape, 0.0 if config.apply_layernorm_1p else 1.0)
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") % 2**63)
    std = config.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.num_layers)
    if name not in VOCABULARY_ROWS:
        return torch.randn(shape, generator=generator) * std
    # The padding depends on the layout, the rows before it must not.
    value = torch.zeros(shape)
    value[:vocab_size] = torch.randn(vocab_size, shape[1], generator=generator) * std
    return value
