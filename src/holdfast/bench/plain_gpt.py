"""The baseline of `bench train`: a minimal GPT-2 in the manner of nanoGPT.

fp32 weights under autocast, torch's own attention, all logits at once, and torch.compile around the whole model. It knows no
layouts, no checkpoints, no padding rules; whatever Holdfast does on top of this has to cost nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class PlainShape:
    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int


class Attention(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).contiguous().view(batch, tokens, width))
        return out


class Block(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.inner = nn.Linear(shape.width, 4 * shape.width)
        self.outer = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.outer(F.gelu(self.inner(self.norm2(x)), approximate="tanh"))
        return out


class PlainGPT(nn.Module):
    """Tokens and labels in, mean loss out."""

    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
