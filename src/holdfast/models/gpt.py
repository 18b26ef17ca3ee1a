"""GPT: a decoder that predicts the next token, from GPT-2 to Llama-type options, as one readable module.

A pipeline stage is the same module with fewer parts: layers keep their global numbers (`decoder.layers.7...`), so a parameter
has one name in every layout. The embedding exists on the first stage, the final norm and the output on the last; tied weights
exist on both and are kept equal from outside.

Shapes: B batch, T tokens, H hidden, V padded vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.config import ModelConfig
from holdfast.models.dropout import DropoutKeys
from holdfast.models.fused import norm
from holdfast.models.layers import Embedding, KeyValueCache, Linear, Shape, TransformerLayer, build_norm, rotary_table
from holdfast.models.loss import VocabShard, vocabulary_loss


class Decoder(nn.Module):
    """The layers that are here, by global number, and after the last one the final norm."""

    def __init__(self, config: ModelConfig, layers: Sequence[int], is_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): TransformerLayer(config, causal=True) for number in layers})
        if is_last:
            self.final_layernorm = build_norm(config)


class GPT(nn.Module):
    """The whole model, or the stage of it that holds `layers`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        max_positions: int,
        dtype: torch.dtype = torch.float32,
        layers: Sequence[int] | None = None,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.dtype = config, vocab_size, dtype
        self.is_first, self.is_last = is_first, is_last
        # parallel/tensor.py sets these: the vocabulary shard, and over how many ranks sequence parallelism splits the tokens.
        self.vocab_shard, self.sequence_shards = VocabShard(), 1
        # Set from outside where tensor-parallel ranks hold copies of the residual stream: they draw its dropout alike.
        self.dropout_keys: DropoutKeys | None = None
        tied = not config.untie_embeddings_and_output_weights
        if is_first or (is_last and tied):
            self.embedding = Embedding(config, padded_vocab_size, max_positions)
            if not is_first:  # the last stage of a pipeline needs only the tied matrix
                self.embedding = nn.Module()  # type: ignore[assignment]
                self.embedding.word_embeddings = nn.Embedding(padded_vocab_size, config.hidden_size)
        self.decoder = Decoder(config, range(config.num_layers) if layers is None else layers, is_last)
        if is_last and not tied:
            self.output_layer = Linear(config.hidden_size, padded_vocab_size, bias=False)

    def output_matrix(self) -> Tensor:
        """The matrix that turns hidden states into logits: the embedding's own, or a separate one."""
        if self.config.untie_embeddings_and_output_weights:
            return self.output_layer.weight
        return self.embedding.word_embeddings.weight

    def hidden(
        self,
        x: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the layers that are here. `x` is tokens on the first stage, hidden states on the others."""
        tokens = x.shape[1] * (1 if self.is_first else self.sequence_shards)
        if positions_BT is None:
            positions_BT = torch.arange(tokens, device=x.device)[None]
        keys = None
        if self.dropout_keys is not None and self.training:
            keys = self.dropout_keys.draw(len(self.decoder.layers))
        if self.is_first:
            x = self.embedding(x, positions_BT, None, self.dtype, keys and keys[-1][0])
        rotary = None
        if self.config.position_embedding_type == "rope":
            cosine, sine = rotary_table(positions_BT, Shape.of(self.config).head, self.config.rotary_base)
            rotary = (cosine[:, None].to(self.dtype), sine[:, None].to(self.dtype))
        if documents_BT is not None:
            same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
            mask = same & torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        for index, layer in enumerate(self.decoder.layers.values()):
            x = layer(x, rotary, mask, None if caches is None else caches[index], keys and keys[index])
        if self.is_last:
            fused = all(layer.fused for layer in self.decoder.layers.values()) and len(self.decoder.layers) > 0
            x = norm(x, self.decoder.final_layernorm)[1] if fused else self.decoder.final_layernorm(x)
        return x

    def forward(
        self,
        x: Tensor,
        labels_BT: Tensor | None = None,
        loss_mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """The summed loss of the tokens that the mask counts (last stage), or hidden states for the next stage."""
        x = self.hidden(x, positions_BT, documents_BT)
        if not self.is_last or labels_BT is None:
            return x
        weights = torch.ones_like(labels_BT, dtype=torch.float32) if loss_mask_BT is None else loss_mask_BT
        shard = self.vocab_shard
        total, _ = vocabulary_loss(
            shard.gather_hidden(x).flatten(0, 1),
            shard.local_rows(self.output_matrix()),
            labels_BT.flatten(),
            weights.flatten(),
            self.vocab_size,
            shard=shard,
        )
        return total[None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the true vocabulary."""
        return (hidden @ self.output_matrix().to(hidden.dtype).T)[..., : self.vocab_size]
