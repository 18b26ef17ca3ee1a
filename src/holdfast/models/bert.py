"""BERT: an encoder that predicts masked tokens and whether two segments belong together, as one readable module.

Two forms: `megatron` has the norms in front of each block and one at the end, `original` has them after each block and one
after the embedding. As in `gpt.py` a pipeline stage is the same module with fewer parts and global names. The language model
head works on the tokens that are to be predicted only, about one in seven: their places are an input, in a fixed number per
sample, so that shapes never change.

Shapes: B batch, T tokens, P tokens to predict per sample (at most), H hidden, V padded vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import ModelConfig
from holdfast.models.dropout import Dropout, DropoutKeys, Keys
from holdfast.models.fused import ResidualStream, fused_post_norm_layer, normed, score_bias, settled
from holdfast.models.layers import MLP, Embedding, Linear, SelfAttention, TransformerLayer, build_norm
from holdfast.models.loss import VocabShard, vocabulary_loss
from holdfast.models.products import ScaleTable

TOKEN_TYPES = 2


class PostNormLayer(nn.Module):
    """Attention and MLP, each added to the residual stream, which is normalised after the addition."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, causal=False)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = MLP(config)
        self.post_mlp_layernorm = build_norm(config)
        self.hidden_dropout = Dropout(config.hidden_dropout)
        self.fused = False
        """As for TransformerLayer."""
        self.fp8: Callable[[], Any] | None = None

    def forward(
        self,
        x_BTH: Tensor | ResidualStream,
        rotary: None = None,
        mask: Tensor | None = None,
        cache: None = None,
        keys: Keys | None = None,
    ) -> Tensor | ResidualStream:
        if self.fused:
            return fused_post_norm_layer(self, x_BTH, mask)
        assert isinstance(x_BTH, Tensor)
        return self.plain(x_BTH, rotary, mask, cache, keys)

    def plain(
        self,
        x_BTH: Tensor,
        rotary: None = None,
        mask: Tensor | None = None,
        cache: None = None,
        keys: Keys | None = None,
    ) -> Tensor:
        first, second = keys or (None, None)
        attended = self.self_attention(x_BTH, rotary, mask)
        x_BTH = self.post_attention_layernorm(x_BTH + self.hidden_dropout(attended, first))
        out: Tensor = self.post_mlp_layernorm(x_BTH + self.hidden_dropout(self.mlp(x_BTH), second))
        return out


class Encoder(nn.Module):
    """The layers that are here, by global number, and in Megatron's form after the last one the final norm."""

    def __init__(self, config: ModelConfig, layers: Sequence[int], is_last: bool) -> None:
        super().__init__()
        original = config.bert_variant == "original"
        self.layers = nn.ModuleDict(
            {str(n): PostNormLayer(config) if original else TransformerLayer(config, causal=False) for n in layers}
        )
        if is_last and not original:
            self.final_layernorm = build_norm(config)


class Pooler(nn.Module):
    """The first token's hidden state, once more transformed: what stands for the whole sample."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_BTH[:, 0]))


class LanguageModelHead(nn.Module):
    """The transform in front of the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.approximate = "tanh" if config.openai_gelu else "none"
        self.layer_norm = build_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer_norm(F.gelu(self.dense(x), approximate=self.approximate))
        return out


class OutputBias(nn.Module):
    """What the tied output matrix has of its own: a bias per token."""

    def __init__(self, padded_vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(padded_vocab_size))


class BERT(nn.Module):
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
        # Set from outside where layers multiply in fp8.
        self.fp8_scales: ScaleTable | None = None
        tied = not config.untie_embeddings_and_output_weights
        if is_first:
            original = config.bert_variant == "original"
            self.embedding = Embedding(config, padded_vocab_size, max_positions, TOKEN_TYPES, normed=original)
        elif is_last and tied:  # the last stage of a pipeline needs only the tied matrix
            self.embedding = nn.Module()  # type: ignore[assignment]
            self.embedding.word_embeddings = nn.Embedding(padded_vocab_size, config.hidden_size)
        self.encoder = Encoder(config, range(config.num_layers) if layers is None else layers, is_last)
        if not is_last:
            return
        self.lm_head = LanguageModelHead(config)
        self.output_layer = OutputBias(padded_vocab_size) if tied else Linear(config.hidden_size, padded_vocab_size)
        if not config.bert_no_binary_head:
            self.pooler = Pooler(config)
            self.binary_head = Linear(config.hidden_size, 2)

    def output_matrix(self) -> Tensor:
        """The matrix that turns hidden states into logits: the embedding's own, or a separate one."""
        if isinstance(self.output_layer, Linear):
            return self.output_layer.weight
        return self.embedding.word_embeddings.weight

    def hidden(self, x: Tensor, padding_BT: Tensor | None = None, types_BT: Tensor | None = None) -> Tensor:
        """Hidden states after the layers that are here. `x` is tokens on the first stage, hidden states on the others.

        `padding_BT` is true where there is a token. Without `types_BT` all tokens are of the first type.
        """
        keys = None
        if self.dropout_keys is not None and self.training:
            keys = self.dropout_keys.draw(len(self.encoder.layers))
        if self.is_first:
            positions_BT = torch.arange(x.shape[1], device=x.device)[None]
            types_BT = torch.zeros_like(x) if types_BT is None else types_BT
            x = self.embedding(x, positions_BT, types_BT, self.dtype, keys and keys[-1][0])
        mask = None if padding_BT is None else padding_BT[:, None, None, :]
        if mask is not None and any(layer.fused for layer in self.encoder.layers.values()):
            mask = score_bias(mask, self.dtype)
        if self.fp8_scales is not None:
            self.fp8_scales.begin_pass(torch.is_grad_enabled(), self.dtype)
        stream: Tensor | ResidualStream = x
        for index, layer in enumerate(self.encoder.layers.values()):
            stream = layer(stream, None, mask, None, keys and keys[index])
        if self.is_last and hasattr(self.encoder, "final_layernorm"):
            return normed(stream, self.encoder.final_layernorm)
        return settled(stream)

    def forward(
        self,
        x: Tensor,
        padding_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        places_BP: Tensor | None = None,
        labels_BP: Tensor | None = None,
        weights_BP: Tensor | None = None,
        is_random_B: Tensor | None = None,
    ) -> Tensor:
        """Sums over the batch (last stage): the masked tokens' losses and right predictions, and where there is a binary
        head the pairs' losses and right predictions. On other stages hidden states for the next one.
        """
        x = self.hidden(x, padding_BT, types_BT)
        if not self.is_last or places_BP is None:
            return x
        assert labels_BP is not None and weights_BP is not None
        shard = self.vocab_shard
        x = shard.gather_tokens(x)
        chosen = x.gather(1, places_BP[..., None].expand(-1, -1, x.shape[-1]))
        total, right, _ = vocabulary_loss(
            shard.copy_hidden(self.lm_head(chosen)).flatten(0, 1),
            shard.local_rows(self.output_matrix()),
            labels_BP.flatten(),
            weights_BP.flatten(),
            self.vocab_size,
            bias_V=shard.local_rows(self.output_layer.bias),
            shard=shard,
        )
        if self.config.bert_no_binary_head:
            return torch.stack((total, right))
        assert is_random_B is not None
        scores = self.binary_head(self.pooler(x)).to(total.dtype)
        hits = (scores.argmax(1) == is_random_B).sum().to(total.dtype)
        return torch.stack((total, right, F.cross_entropy(scores, is_random_B, reduction="sum"), hits))

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the true vocabulary for every token, and the scores of the binary head."""
        matrix, bias = self.output_matrix().to(hidden.dtype), self.output_layer.bias.to(hidden.dtype)
        vocabulary = F.linear(self.lm_head(hidden), matrix, bias)[..., : self.vocab_size]
        return vocabulary, None if self.config.bert_no_binary_head else self.binary_head(self.pooler(hidden))
