"""One decoding step as a few Triton kernels per layer, for up to MAX_ROWS sequences on a CUDA device.

A layer is five kernels: norm and q/k/v product with the cache write; attention; output projection into the residual stream; norm
and first MLP product with the activation; second MLP product into the residual stream. For several sequences the norms are
kernels of their own. Weights stay where the model has them; a quantized step has its own copies of the matrices.

The kernels are launched so that each starts before its predecessor ends, where the device can (programmatic dependent launch).
The first kernel of a step waits for all earlier work, so that no step reads a cache that the step before it still writes.

Shapes: B slots, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor, nn

from holdfast.config import ModelConfig
from holdfast.generation.cache import SlotCache
from holdfast.generation.model_step import WeightType
from holdfast.kernels import decode
from holdfast.models.gpt import GPT
from holdfast.models.layers import Shape, TransformerLayer
from holdfast.models.rotary import rotary_table

MAX_ROWS = 64
# Parts into which the products with few outputs divide their inputs.
PARTS = 4
# Options of a model that the kernels compute. Any other option must have its default value.
KNOWN = {
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels",
    "max_position_embeddings", "position_embedding_type", "rotary_base", "normalization", "norm_epsilon", "openai_gelu",
    "swiglu", "untie_embeddings_and_output_weights", "disable_bias_linear", "hidden_dropout", "attention_dropout",
    "init_method_std", "vocab_size", "make_vocab_size_divisible_by", "add_qkv_bias", "use_rope_scaling",
    "rope_scaling_type", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor",
    "original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_attention_factor",
}  # fmt: skip


def can_fuse_step(model: GPT) -> bool:
    """Whether the kernels compute this model: on CUDA, in a 16-bit type, head widths 64 to 128, options that they know."""
    config = model.config
    plain = all(getattr(config, f.name) == f.default for f in fields(ModelConfig) if f.name not in KNOWN)
    dynamic = config.use_rope_scaling and config.rope_scaling_type == "dynamic"
    head = Shape.of(config).head
    weight = model.output_matrix()
    return (
        plain
        and not dynamic
        and weight.is_cuda
        and model.dtype == weight.dtype
        and model.dtype in (torch.bfloat16, torch.float16)
        and 64 <= head <= 128
        and head % 16 == 0
        and config.hidden_size % 16 == 0
        and all(parameter.is_contiguous() for parameter in model.parameters())
    )


class FusedStep:
    """A `DecodeStep` for the models that `can_fuse_step` accepts; more than MAX_ROWS sequences go to the step `general`."""

    def __init__(
        self,
        model: GPT,
        general: Callable[[Tensor, Tensor, SlotCache, int], Tensor] | None = None,
        *,
        weights: WeightType | None = None,
        dependent_launch: bool | None = None,
    ) -> None:
        device = next(model.parameters()).device
        if dependent_launch is None:
            dependent_launch = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._general, self._pdl = general, dependent_launch
        self._model, self._shape = model, Shape.of(model.config)
        self._layers = [
            DecodeLayer.of(cast(TransformerLayer, layer), weights) for layer in model.decoder.layers.values()
        ]
        self._final_norm = _norm(model.decoder.final_layernorm)
        self._output = _weight(model.output_matrix(), None, weights)
        self._buffers: dict[tuple[int, int], Buffers] = {}
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, cache: SlotCache, span: int) -> Tensor:
        model, rows, places = self._model, len(tokens_B), None
        if rows > MAX_ROWS and self._general is not None:
            return self._general(tokens_B, positions_B, cache, span)
        if model.config.position_embedding_type == "learned_absolute":
            places = model.embedding.position_embeddings.weight
        splits = decode.choose_splits(rows, self._shape.groups, span, tokens_B.device)
        buffers = self._buffers.get((rows, splits)) or Buffers.of(model, rows, splits)
        self._buffers[rows, splits] = buffers
        decode.embed(tokens_B, positions_B, model.embedding.word_embeddings.weight, places, buffers.x, self._pdl)
        write = self._write_tokens(positions_B, cache)
        return self._vector_step(buffers, write) if rows == 1 else self._matrix_step(buffers, write)

    def _vector_step(self, buffers: "Buffers", write: "CacheWrite") -> Tensor:
        """One row: each product computes the norm before it and adds its result to the residual stream."""
        pdl, x, inner = self._pdl, buffers.x, buffers.inner
        for number, layer in enumerate(self._layers):
            keys, values = write.layer(number, 1)
            decode.project_qkv(
                x, layer.input_norm, layer.qkv, buffers.query, keys, values, write.positions_B, write.rotary, pdl
            )
            attended = self._attend(buffers, keys, values, write.positions_B)
            decode.linear(attended, layer.proj, x, pdl, output="add")
            decode.linear(x, layer.fc1, inner, pdl, output=layer.activation, norm=layer.mlp_norm, twin=layer.up)
            decode.linear(inner, layer.fc2, x, pdl, output="add")
        decode.linear(x, self._output, buffers.logits, pdl, norm=self._final_norm)
        return buffers.logits

    def _matrix_step(self, buffers: "Buffers", write: "CacheWrite") -> Tensor:
        """Several rows: norms are kernels of their own, which also add the partial sums of the product before them."""
        dtype, pdl, x, normed = self._model.dtype, self._pdl, buffers.x, buffers.normed
        partial, bias = None, None
        for number, layer in enumerate(self._layers):
            keys, values = write.layer(number, len(x))
            decode.norm(x, layer.input_norm, normed, partial, bias, pdl)
            decode.matrix_qkv(
                normed, layer.qkv, buffers.query, keys, values, write.positions_B, write.rotary, dtype, pdl
            )
            attended = self._attend(buffers, keys, values, write.positions_B)
            decode.matrix(attended, layer.proj, buffers.attention_parts, dtype, pdl, output="partial")
            decode.norm(x, layer.mlp_norm, normed, buffers.attention_parts, layer.proj.bias, pdl)
            decode.matrix(normed, layer.fc1, buffers.inner, dtype, pdl, output=layer.activation, twin=layer.up)
            decode.matrix(buffers.inner, layer.fc2, buffers.mlp_parts, dtype, pdl, output="partial")
            partial, bias = buffers.mlp_parts, layer.fc2.bias
        decode.norm(x, self._final_norm, normed, partial, bias, pdl)
        decode.matrix(normed, self._output, buffers.logits, dtype, pdl)
        return buffers.logits

    def _attend(self, buffers: "Buffers", keys_BGSD: Tensor, values_BGSD: Tensor, positions_B: Tensor) -> Tensor:
        """The attention output (rows, heads · head width)."""
        attended, lse = buffers.attended, buffers.lse
        decode.attend(buffers.query, keys_BGSD, values_BGSD, positions_B, attended, lse, self._pdl)
        if len(lse) == 1:
            return attended[0]
        decode.merge(attended, lse, buffers.merged, self._pdl)
        return buffers.merged

    def _write_tokens(self, positions_B: Tensor, cache: SlotCache) -> "CacheWrite":
        rotary = None
        if self._model.config.position_embedding_type == "rope":
            rotary = self._rotary_of(cache.length, positions_B.device)
        return CacheWrite(cache, positions_B, rotary)

    def _rotary_of(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines (positions, half a head) of every position of the cache."""
        if length not in self._rotary:
            half, places = self._shape.head // 2, torch.arange(length, device=device)[None]
            cosine, sine = rotary_table(self._model.config, places, self._shape.head)
            self._rotary[length] = cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()
        return self._rotary[length]


@dataclass(frozen=True)
class CacheWrite:
    """Where a step writes its keys and values, and the rotary table for it."""

    cache: SlotCache
    positions_B: Tensor
    rotary: tuple[Tensor, Tensor] | None

    def layer(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        return self.cache.keys_NBGSD[number, :rows], self.cache.values_NBGSD[number, :rows]


@dataclass(frozen=True)
class DecodeLayer:
    """The weights of one layer; `up` is the second matrix of a gated MLP."""

    input_norm: decode.DecodeNorm
    qkv: decode.Weight
    proj: decode.Weight
    mlp_norm: decode.DecodeNorm
    fc1: decode.Weight
    up: decode.Weight | None
    fc2: decode.Weight
    activation: str

    @staticmethod
    def of(layer: TransformerLayer, weights: WeightType | None) -> "DecodeLayer":
        attention, mlp = layer.self_attention, layer.mlp

        def read(linear: nn.Linear) -> decode.Weight:
            return _weight(linear.weight, linear.bias, weights)

        gelu = "gelu_tanh" if mlp.approximate == "tanh" else "gelu"
        return DecodeLayer(
            input_norm=_norm(layer.input_layernorm),
            qkv=read(attention.linear_qkv),
            proj=read(attention.linear_proj),
            mlp_norm=_norm(layer.pre_mlp_layernorm),
            fc1=read(mlp.linear_fc1_gate if mlp.swiglu else mlp.linear_fc1),
            up=read(mlp.linear_fc1_up) if mlp.swiglu else None,
            fc2=read(mlp.linear_fc2),
            activation="swiglu" if mlp.swiglu else gelu,
        )


def _weight(matrix: Tensor, bias: Tensor | None, weights: WeightType | None) -> decode.Weight:
    found = decode.Weight(matrix.detach(), None if bias is None else bias.detach())
    return found if weights is None else decode.quantize(found, weights)


def _norm(norm: nn.Module) -> decode.DecodeNorm:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
    if isinstance(norm, nn.LayerNorm):
        return decode.DecodeNorm("LayerNorm", norm.weight, norm.bias, norm.eps)
    return decode.DecodeNorm("RMSNorm", norm.weight, None, norm.eps)


@dataclass(frozen=True)
class Buffers:
    """Activations of a step. The residual stream `x` is fp32."""

    x: Tensor
    normed: Tensor
    query: Tensor
    attended: Tensor
    lse: Tensor
    merged: Tensor
    attention_parts: Tensor
    inner: Tensor
    mlp_parts: Tensor
    logits: Tensor

    @staticmethod
    def of(model: GPT, rows: int, splits: int) -> "Buffers":
        config, shape, device = model.config, Shape.of(model.config), model.output_matrix().device
        heads, dtype = config.num_attention_heads, model.dtype

        def new(*sizes: int, type: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=type, device=device)

        return Buffers(
            x=new(rows, config.hidden_size),
            normed=new(rows, config.hidden_size, type=dtype),
            query=new(rows, heads, shape.head),
            attended=new(splits, rows, heads * shape.head, type=dtype if splits == 1 else torch.float32),
            lse=new(splits, rows, heads),
            merged=new(rows, heads * shape.head, type=dtype),
            attention_parts=new(decode.count_parts(heads * shape.head, PARTS), rows, config.hidden_size),
            inner=new(rows, shape.ffn, type=dtype),
            mlp_parts=new(decode.count_parts(shape.ffn, PARTS), rows, config.hidden_size),
            logits=new(rows, model.vocab_size),
        )
