"""Rotary positions: frequencies with their scaling for long sequences, tables of angles, and the rotation itself.

Frequencies and angles are computed in fp64 and cast once. Components are in the half-split order of Megatron and Hugging Face:
those with the same index in the first and in the second half turn together.

Shapes: B batch, T tokens, R rotated width of a head, D head width.
"""

import math

import torch
from torch import Tensor

from holdfast.config import ModelConfig


def rotary_width(config: ModelConfig, head: int) -> int:
    """Number of components of a head that are rotated."""
    return int(head * config.rotary_percent)


def rotary_table(config: ModelConfig, positions_BT: Tensor, head: int, whole: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, T, R) of the rotary angles, in fp64.

    `whole`: the rows are texts that are read at once. Otherwise each token is the last one of its text so far, which decides the
    dynamic scaling.
    """
    width = rotary_width(config, head)
    exponents = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float64) / width
    base: Tensor | float = config.rotary_base
    if config.use_rope_scaling and config.rope_scaling_type == "dynamic":
        lengths = positions_BT.amax(dim=-1, keepdim=True) + 1 if whole else positions_BT + 1
        base = _dynamic_base(config, lengths, width)[..., None]
    frequencies, factor = base**-exponents, 1.0
    if config.use_rope_scaling and config.rope_scaling_type != "dynamic":
        frequencies, factor = _scaled(config, frequencies, width)
    angles = positions_BT[..., None].double() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def _dynamic_base(config: ModelConfig, lengths: Tensor, width: int) -> Tensor:
    """The base that grows with the length of a text, beyond the original length."""
    factor, original = config.rope_scaling_factor, config.original_max_position_embeddings
    grown = factor * lengths.clamp(min=original).double() / original - (factor - 1)
    return config.rotary_base * grown ** (width / (width - 2))


def _scaled(config: ModelConfig, frequencies: Tensor, width: int) -> tuple[Tensor, float]:
    """Frequencies after the configured scaling, and the factor of the cosines and sines."""
    factor, original = config.rope_scaling_factor, config.original_max_position_embeddings
    if config.rope_scaling_type == "linear":
        return frequencies / factor, 1.0
    if config.rope_scaling_type == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = original * frequencies / (2 * math.pi)  # within the original length
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor), 1.0
    # YaRN: the component that makes `turns` turns within the original length, as a real number
    first, last = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))
        for turns in (config.yarn_beta_fast, config.yarn_beta_slow)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
    components = torch.arange(width // 2, device=frequencies.device, dtype=torch.float64)
    scaled = ((components - first) / max(last - first, 0.001)).clamp(0, 1)
    attention = config.yarn_attention_factor
    if attention is None:
        attention = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return frequencies * (scaled / factor + (1 - scaled)), attention


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions applied to the first R components of (B, heads, T, D)."""
    width = cosine.shape[-1]
    turned, kept = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    half = width // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    out = turned * cosine.to(x.dtype) + swapped * sine.to(x.dtype)
    return out if kept is None else torch.cat((out, kept), dim=-1)
