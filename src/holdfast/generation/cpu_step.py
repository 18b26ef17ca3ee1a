"""A decoding step on the CPU as direct calls of torch's functions: the mathematics of the model's layers without its modules.

One token of a small model takes about as long in the calls of nn.Module as in its matrix products. The plain step is the
reference: a test compares the two.

Shapes: B slots, S entries attended to, H hidden, G query groups, Q query heads per group, D head width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import needs_plain_layers
from holdfast.generation.cache import SlotCache
from holdfast.models.gpt import GPT
from holdfast.models.layers import LayerNorm, Shape, TransformerLayer
from holdfast.models.rotary import rotary_table, rotate
from holdfast.models.segments import visible

Map = Callable[[Tensor], Tensor]


def can_step_directly(model: GPT) -> bool:
    """GPT-2 and Llama types on the CPU, whose weights have the compute type."""
    config, weight = model.config, model.output_matrix()
    known = not needs_plain_layers(config)
    return known and weight.device.type == "cpu" and weight.dtype == model.dtype and not model.training


class CPUStep:
    """A DecodeStep. It holds views of the model's weights."""

    def __init__(self, model: GPT) -> None:
        self._model, self._shape = model, Shape.of(model.config)
        layers = model.decoder.layers.values()
        self._layers = [_Layer(layer) for layer in layers if isinstance(layer, TransformerLayer)]
        self._norm = _norm(model.decoder.final_layernorm)
        self._output = model.output_matrix().T
        self._words = model.embedding.word_embeddings.weight
        learned = model.config.position_embedding_type == "learned_absolute"
        self._positions = model.embedding.position_embeddings.weight if learned else None

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, cache: SlotCache, span: int) -> Tensor:
        config, count = self._model.config, len(tokens_B)
        x = F.embedding(tokens_B, self._words)
        if self._positions is not None:
            x = x + F.embedding(positions_B, self._positions)
        seen = visible(positions_B[:, None], torch.arange(span), config.window_size)[:, None]
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill_(~seen, -torch.inf)
        rotary = None
        if config.position_embedding_type == "rope":
            cosine, sine = rotary_table(config, positions_B[:, None], self._shape.head)
            rotary = (cosine[:, None].to(x.dtype), sine[:, None].to(x.dtype))
        rows = torch.arange(count)
        for index, layer in enumerate(self._layers):
            keys, values = cache.keys_NBGSD[index, :count], cache.values_NBGSD[index, :count]
            query, key, value = self._split(layer.qkv(layer.attention_norm(x)), rotary)
            keys[rows, :, positions_B] = key
            values[rows, :, positions_B] = value
            grouped = self._shape.heads_per_group > 1
            attended = F.scaled_dot_product_attention(
                query, keys[:, :, :span], values[:, :, :span], attn_mask=mask, enable_gqa=grouped
            )
            x = x + layer.projection(attended.reshape(count, -1))
            x = x + layer.mlp(layer.mlp_norm(x))
        return (self._norm(x) @ self._output)[:, : self._model.vocab_size]

    def _split(self, qkv_BH: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, G·Q, 1, D), key and value (B, G, D)."""
        groups, heads, head = self._shape.groups, self._shape.heads_per_group, self._shape.head
        qkv = qkv_BH.view(len(qkv_BH), groups, heads + 2, head)
        query = qkv[:, :, :heads].reshape(len(qkv_BH), groups * heads, 1, head)
        key, value = qkv[:, :, heads], qkv[:, :, heads + 1]
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key[:, :, None], *rotary)[:, :, 0]
        return query, key, value


class _Layer:
    """The maps of one layer."""

    def __init__(self, layer: TransformerLayer) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self.attention_norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.pre_mlp_layernorm)
        self.qkv, self.projection = _linear(attention.linear_qkv), _linear(attention.linear_proj)
        last = _linear(mlp.linear_fc2)
        if mlp.swiglu:
            gate, up = _linear(mlp.linear_fc1_gate), _linear(mlp.linear_fc1_up)
            self.mlp: Map = lambda x: last(F.silu(gate(x)) * up(x))
        else:
            first, approximate = _linear(mlp.linear_fc1), mlp.approximate
            self.mlp = lambda x: last(F.gelu(first(x), approximate=approximate))


def _linear(module: nn.Linear) -> Map:
    weight, bias = module.weight.T, getattr(module, "bias", None)
    return (lambda x: x @ weight) if bias is None else (lambda x: torch.addmm(bias, x, weight))


def _norm(module: nn.Module) -> Map:
    if isinstance(module, LayerNorm):
        shape, weight, bias, epsilon = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, epsilon)
    return module.forward
