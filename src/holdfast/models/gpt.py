"""GPT: a decoder that predicts the next token; Llama, Qwen, Mistral, Gemma 2 and GPT-NeoX are options of this one module.

A pipeline stage is the same module with fewer parts: layers keep their global numbers (`decoder.layers.7...`), so a parameter
has one name in every layout. The embedding exists on the first stage, the final norm and the output on the last; tied weights
exist on both and are kept equal from outside.

Shapes: B batch, T tokens, H hidden, V padded vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from holdfast.config import ModelConfig
from holdfast.models.dropout import DropoutKeys
from holdfast.models.fused import ResidualStream, normed, settled
from holdfast.models.layers import Embedding, KeyValueCache, Linear, Shape, TransformerLayer, build_norm
from holdfast.models.loss import VocabShard, vocabulary_loss
from holdfast.models.products import ScaleTable
from holdfast.models.rotary import rotary_table
from holdfast.models.segments import Segments


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
        # Set from outside: the coefficient of z-loss, which the last stage then gives apart from the cross entropy.
        self.z_loss = 0.0
        # Set from outside where layers multiply in fp8.
        self.fp8_scales: ScaleTable | None = None
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
        document_ends: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        masks: Mapping[tuple[int, ...], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the layers that are here. `x` is tokens on the first stage, hidden states on the others.

        `documents_BT`: the number of each token's document. `document_ends`: the same as the ends of `Segments`, which need no
        look at the values. `masks`: window of a layer → what its tokens attend to, instead of the tokens before them in their
        documents: where a cache holds what precedes them.
        """
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
            cosine, sine = rotary_table(self.config, positions_BT, Shape.of(self.config).head, whole=masks is None)
            rotary = (cosine[:, None].to(self.dtype), sine[:, None].to(self.dtype))
        attended = masks if masks is not None else self._segments(tokens, x, documents_BT, document_ends)
        if self.fp8_scales is not None:
            self.fp8_scales.begin_pass(torch.is_grad_enabled(), self.dtype)
        stream: Tensor | ResidualStream = x
        for index, (number, layer) in enumerate(self.decoder.layers.items()):
            mask = attended[self.config.layer_window(int(number))]
            stream = layer(stream, rotary, mask, None if caches is None else caches[index], keys and keys[index])
        return normed(stream, self.decoder.final_layernorm) if self.is_last else settled(stream)

    def windows(self) -> set[tuple[int, ...]]:
        """The different windows of the layers that are here."""
        return {self.config.layer_window(int(number)) for number in self.decoder.layers}

    def _segments(
        self, tokens: int, x: Tensor, documents_BT: Tensor | None, ends: Tensor | None
    ) -> dict[tuple[int, ...], Segments | None]:
        """Window → the documents that tokens attend in; None where plain causal attention is the same."""
        found: dict[tuple[int, ...], Segments | None] = dict.fromkeys(self.windows())
        plain = documents_BT is None and ends is None and not self.config.attn_logit_softcapping
        cut = [window for window in found if not plain or (window and tokens > window[0] + 1)]
        if cut and ends is not None:
            rows = Segments(ends, tokens)
        elif cut:
            rows = Segments.rows(len(x), tokens, (), x.device) if documents_BT is None else Segments.of(documents_BT)
        return found | {window: replace(rows, window=window) for window in cut}

    def forward(
        self,
        x: Tensor,
        labels_BT: Tensor | None = None,
        loss_mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        document_ends: Tensor | None = None,
    ) -> Tensor:
        """[cross entropy], or [cross entropy, z-loss] with a z-loss, summed over the tokens that the mask counts (last stage), or
        hidden states for the next stage."""
        x = self.hidden(x, positions_BT, documents_BT, document_ends)
        if not self.is_last or labels_BT is None:
            return x
        weights = torch.ones_like(labels_BT, dtype=torch.float32) if loss_mask_BT is None else loss_mask_BT
        shard = self.vocab_shard
        total, _, z = vocabulary_loss(
            shard.gather_hidden(x).flatten(0, 1),
            shard.local_rows(self.output_matrix()),
            labels_BT.flatten(),
            weights.flatten(),
            self.vocab_size,
            shard=shard,
            z_loss=self.z_loss,
            softcap=self.config.final_logit_softcapping,
        )
        return torch.stack((total - z, z)) if self.z_loss else total[None]  # z has no gradient, total that of both

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the true vocabulary."""
        logits = (hidden @ self.output_matrix().to(hidden.dtype).T)[..., : self.vocab_size]
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits
