"""The parts that GPT and BERT share: linear maps, norms, rotary positions, attention, the MLP, one transformer layer.

Plain torch.nn, written for one device. Tensor parallelism cuts `linear_qkv` and `linear_fc1` by rows and `linear_proj` and
`linear_fc2` by columns from outside; the code here only never assumes that it holds all heads. Parameters are fp32; the
compute type is that of the activations.

Shapes: B batch, T tokens, S tokens attended to, H hidden, G query groups here, Q query heads per group, D head width.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import ModelConfig
from holdfast.models.dropout import Dropout, Keys
from holdfast.models.fused import fused_layer


class Linear(nn.Linear):
    """A linear map that casts its fp32 weight to the type of its input: mixed precision without autocast."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the type of its input; the kernels accumulate in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in at least fp32 and given back in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        assert self.eps is not None
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


def build_norm(config: ModelConfig) -> nn.Module:
    if config.normalization == "RMSNorm":
        return RMSNorm(config.hidden_size, eps=config.norm_epsilon)
    return LayerNorm(config.hidden_size, eps=config.norm_epsilon)


@dataclass(frozen=True)
class Shape:
    """The sizes that ModelConfig leaves to be derived."""

    head: int
    groups: int
    heads_per_group: int
    ffn: int

    @staticmethod
    def of(config: ModelConfig) -> "Shape":
        groups = config.num_query_groups or config.num_attention_heads
        head = config.kv_channels or config.hidden_size // config.num_attention_heads
        default_ffn = config.hidden_size * 8 // 3 // 64 * 64 if config.swiglu else 4 * config.hidden_size
        return Shape(head, groups, config.num_attention_heads // groups, config.ffn_hidden_size or default_ffn)


class KeyValueCache(Protocol):
    """Keys and values of the tokens seen so far, for generation."""

    def extend(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]: ...


def rotary_table(positions: Tensor, head: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, D) of the rotary angles, in the half-split order of Megatron and Hugging Face."""
    frequencies = base ** (-torch.arange(0, head, 2, device=positions.device, dtype=torch.float64) / head)
    angles = positions[..., None].double() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions applied to (B, heads, T, D)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosine.to(x.dtype) + turned * sine.to(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head or grouped-query attention over one fused projection, rows ordered (groups, Q + key + value, D)."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        shape = Shape.of(config)
        self.head, self.heads_per_group, self.causal = shape.head, shape.heads_per_group, causal
        self.dropout = config.attention_dropout
        bias = not config.disable_bias_linear
        rows = shape.groups * (shape.heads_per_group + 2) * shape.head
        self.linear_qkv = Linear(config.hidden_size, rows, bias=bias)
        self.linear_proj = Linear(config.num_attention_heads * shape.head, config.hidden_size, bias=bias)

    def forward(
        self,
        x_BTH: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        qkv = self.linear_qkv(x_BTH)
        batch, tokens, _ = qkv.shape
        # -1: the groups that are here, all of them or a tensor-parallel share
        qkv = qkv.view(batch, tokens, -1, self.heads_per_group + 2, self.head)
        query, key, value = qkv.split((self.heads_per_group, 1, 1), dim=3)
        query = query.flatten(2, 3).transpose(1, 2)  # B, G·Q, T, D
        key, value = key.squeeze(3).transpose(1, 2), value.squeeze(3).transpose(1, 2)  # B, G, T, D
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        if cache is not None:
            key, value = cache.extend(key, value)
        y = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            enable_gqa=self.heads_per_group > 1,
        )
        out: Tensor = self.linear_proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two linear maps with GELU between them, or the gated SiLU form of three."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ffn, bias = Shape.of(config).ffn, not config.disable_bias_linear
        self.swiglu, self.approximate = config.swiglu, "tanh" if config.openai_gelu else "none"
        if config.swiglu:
            self.linear_fc1_gate = Linear(config.hidden_size, ffn, bias=bias)
            self.linear_fc1_up = Linear(config.hidden_size, ffn, bias=bias)
        else:
            self.linear_fc1 = Linear(config.hidden_size, ffn, bias=bias)
        self.linear_fc2 = Linear(ffn, config.hidden_size, bias=bias)

    def forward(self, x_BTH: Tensor) -> Tensor:
        if self.swiglu:
            inner = F.silu(self.linear_fc1_gate(x_BTH)) * self.linear_fc1_up(x_BTH)
        else:
            inner = F.gelu(self.linear_fc1(x_BTH), approximate=self.approximate)
        out: Tensor = self.linear_fc2(inner)
        return out


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attention = SelfAttention(config, causal)
        self.pre_mlp_layernorm = build_norm(config)
        self.mlp = MLP(config)
        self.hidden_dropout = Dropout(config.hidden_dropout)
        self.fused = False
        """Set from outside where `models/fused.py` computes this layer without a mask or a cache."""
        self.fp8 = False
        """Set from outside where the products of a fused layer run in fp8."""

    def forward(
        self,
        x_BTH: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        keys: Keys | None = None,
    ) -> Tensor:
        if self.fused and mask is None and cache is None:
            return fused_layer(self, x_BTH, rotary)
        return self.plain(x_BTH, rotary, mask, cache, keys)

    def plain(
        self,
        x_BTH: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        keys: Keys | None = None,
    ) -> Tensor:
        first, second = keys or (None, None)
        attended = self.self_attention(self.input_layernorm(x_BTH), rotary, mask, cache)
        x_BTH = x_BTH + self.hidden_dropout(attended, first)
        out: Tensor = x_BTH + self.hidden_dropout(self.mlp(self.pre_mlp_layernorm(x_BTH)), second)
        return out


class Embedding(nn.Module):
    """Token and position vectors, and for BERT token types, added up in the compute type; normalised in the original BERT."""

    def __init__(
        self, config: ModelConfig, padded_vocab_size: int, positions: int, token_types: int = 0, normed: bool = False
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(padded_vocab_size, config.hidden_size)
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(positions, config.hidden_size)
        if token_types:
            self.tokentype_embeddings = nn.Embedding(token_types, config.hidden_size)
        if normed:
            self.layernorm = build_norm(config)
        self.embedding_dropout = Dropout(config.hidden_dropout)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        types_BT: Tensor | None,
        dtype: torch.dtype,
        key: Tensor | None = None,
    ) -> Tensor:
        x = self.word_embeddings(tokens_BT)
        if hasattr(self, "position_embeddings"):
            x = x + self.position_embeddings(positions_BT)
        if types_BT is not None:
            x = x + self.tokentype_embeddings(types_BT)
        x = x.to(dtype)
        if hasattr(self, "layernorm"):
            x = self.layernorm(x)
        out: Tensor = self.embedding_dropout(x, key)
        return out
