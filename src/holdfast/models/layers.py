"""The parts that GPT and BERT share: linear maps, norms, attention, the MLP, one transformer layer.

Plain torch.nn, written for one device. Tensor parallelism cuts `linear_qkv` and `linear_fc1` by rows and `linear_proj` and
`linear_fc2` by columns from outside; the code here only never assumes that it holds all heads. Parameters are fp32; the
compute type is that of the activations.

Shapes: B batch, T tokens, S tokens attended to, H hidden, G query groups here, Q query heads per group, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import ModelConfig, needs_plain_layers
from holdfast.models.dropout import Dropout, Keys
from holdfast.models.fused import ResidualStream, fused_layer
from holdfast.models.rotary import rotate
from holdfast.models.segments import Scores, Segments


class Linear(nn.Linear):
    """A linear map that casts its fp32 weight to the type of its input: mixed precision without autocast."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the type of its input; the kernels accumulate in fp32."""

    plus_one = False

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        weight = self.weight + 1 if self.plus_one else self.weight
        return F.layer_norm(input, self.normalized_shape, weight.to(input.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in at least fp32 and given back in the type of its input."""

    plus_one = False

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        assert self.eps is not None
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus_one:  # as Gemma rounds it: once, after the product
            return (normed * (self.weight.to(wide.dtype) + 1)).to(x.dtype)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


def build_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """The configured norm over `width` components, by default the hidden size."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    norm = kind(width or config.hidden_size, eps=config.norm_epsilon)
    norm.plus_one = config.apply_layernorm_1p
    return norm


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
        return Shape(head, groups, config.num_attention_heads // groups, config.ffn)


class KeyValueCache(Protocol):
    """Keys and values of the tokens seen so far, for generation."""

    def extend(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]: ...


class SelfAttention(nn.Module):
    """Multi-head or grouped-query attention over one fused projection, rows ordered (groups, Q + key + value, D)."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        shape = Shape.of(config)
        self.head, self.heads_per_group, self.causal = shape.head, shape.heads_per_group, causal
        self.dropout = config.attention_dropout
        scale = config.query_pre_attn_scalar and config.query_pre_attn_scalar**-0.5
        self.scores = Scores(scale, config.attn_logit_softcapping)
        self.backend: str | None = None
        """Set from outside: the kernel that a fused layer calls."""
        bias = not config.disable_bias_linear
        rows = shape.groups * (shape.heads_per_group + 2) * shape.head
        self.linear_qkv = Linear(config.hidden_size, rows, bias=bias or config.add_qkv_bias)
        self.linear_proj = Linear(config.num_attention_heads * shape.head, config.hidden_size, bias=bias)
        if config.qk_layernorm:
            self.q_layernorm, self.k_layernorm = build_norm(config, shape.head), build_norm(config, shape.head)
        self.normed = config.qk_layernorm

    def forward(
        self,
        x_BTH: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Segments | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        qkv = self.linear_qkv(x_BTH)
        batch, tokens, _ = qkv.shape
        # -1: the groups that are here, all of them or a tensor-parallel share
        qkv = qkv.view(batch, tokens, -1, self.heads_per_group + 2, self.head)
        query, key, value = qkv.split((self.heads_per_group, 1, 1), dim=3)
        query = query.flatten(2, 3).transpose(1, 2)  # B, G·Q, T, D
        key, value = key.squeeze(3).transpose(1, 2), value.squeeze(3).transpose(1, 2)  # B, G, T, D
        if self.normed:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        if cache is not None:
            key, value = cache.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, Segments):
            y = mask.attend(query, key, value, dropout, self.scores)
        else:
            y = self.scores.attend(query, key, value, mask, dropout, self.causal and mask is None)
        out: Tensor = self.linear_proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two linear maps with GELU between them, or the gated form of three with SiLU or GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ffn, bias = Shape.of(config).ffn, not config.disable_bias_linear
        self.swiglu, self.approximate = config.swiglu, "tanh" if config.openai_gelu else "none"
        self.gated = config.gated
        if config.gated:
            self.linear_fc1_gate = Linear(config.hidden_size, ffn, bias=bias)
            self.linear_fc1_up = Linear(config.hidden_size, ffn, bias=bias)
        else:
            self.linear_fc1 = Linear(config.hidden_size, ffn, bias=bias)
        self.linear_fc2 = Linear(ffn, config.hidden_size, bias=bias)
        self.epilogue = False
        """Set from outside where the products of a fused layer compute the activation."""

    def forward(self, x_BTH: Tensor) -> Tensor:
        inner = self.linear_fc1_gate(x_BTH) if self.gated else self.linear_fc1(x_BTH)
        inner = F.silu(inner) if self.swiglu else F.gelu(inner, approximate=self.approximate)
        if self.gated:
            inner = inner * self.linear_fc1_up(x_BTH)
        out: Tensor = self.linear_fc2(inner)
        return out


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream, or both at once to their common input."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attention = SelfAttention(config, causal)
        self.pre_mlp_layernorm = build_norm(config)
        self.mlp = MLP(config)
        self.hidden_dropout = Dropout(config.hidden_dropout)
        self.parallel_residual, self.post_norm = config.use_parallel_residual, config.post_block_norm
        if config.post_block_norm:
            self.post_attention_layernorm, self.post_mlp_layernorm = build_norm(config), build_norm(config)
        self.can_fuse = not (needs_plain_layers(config) or config.rotary_percent < 1)
        """Whether the fused functions know all options of this layer."""
        self.fused = False
        """Set from outside where `models/fused.py` computes this layer, without a cache."""
        self.fp8: Callable[[], Any] | None = None
        """Set from outside where the products of a fused layer run in fp8: gives their scales."""

    def forward(
        self,
        x_BTH: Tensor | ResidualStream,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Segments | None = None,
        cache: KeyValueCache | None = None,
        keys: Keys | None = None,
    ) -> Tensor | ResidualStream:
        if self.fused and cache is None:
            return fused_layer(self, x_BTH, rotary, mask)
        assert isinstance(x_BTH, Tensor)
        return self.plain(x_BTH, rotary, mask, cache, keys)

    def plain(
        self,
        x_BTH: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Segments | None = None,
        cache: KeyValueCache | None = None,
        keys: Keys | None = None,
    ) -> Tensor:
        first, second = keys or (None, None)
        attended = self.self_attention(self.input_layernorm(x_BTH), rotary, mask, cache)
        attended = self.hidden_dropout(self.post_attention_layernorm(attended) if self.post_norm else attended, first)
        if not self.parallel_residual:
            x_BTH = x_BTH + attended
        result = self.mlp(self.pre_mlp_layernorm(x_BTH))
        result = self.post_mlp_layernorm(result) if self.post_norm else result
        result = self.hidden_dropout(result, second)
        # in transformers' order, which decides how 16-bit sums are rounded
        out: Tensor = result + attended + x_BTH if self.parallel_residual else x_BTH + result
        return out


class Embedding(nn.Module):
    """Token and position vectors, and for BERT token types, added up in the compute type; normalised in the original BERT."""

    def __init__(
        self, config: ModelConfig, padded_vocab_size: int, positions: int, token_types: int = 0, normed: bool = False
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(padded_vocab_size, config.hidden_size)
        self.multiplier = config.hidden_size**0.5 if config.scale_embeddings else None
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
        if self.multiplier is not None:  # rounded to the type of the weights, as transformers does
            x = x * torch.tensor(self.multiplier, dtype=x.dtype).item()
        if types_BT is not None:  # before the positions, as transformers rounds 16-bit sums
            x = x + self.tokentype_embeddings(types_BT)
        if hasattr(self, "position_embeddings"):
            x = x + self.position_embeddings(positions_BT)
        x = x.to(dtype)
        if hasattr(self, "layernorm"):
            x = self.layernorm(x)
        out: Tensor = self.embedding_dropout(x, key)
        return out
