"""Inference with BERT: the likeliest tokens for the masks of a text, and embeddings of texts.

Texts of different lengths run in one batch, padded at the end; attention masks the padding.

Shapes: B texts, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from holdfast.conversion.model import Model
from holdfast.generation.loading import belonging_tokenizer, build_empty, choose_device, fill, read_source
from holdfast.models.bert import BERT, TOKEN_TYPES
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers import Tokenizer

# Texts in one batch.
ROWS = 32


@dataclass(frozen=True)
class LoadedBERT:
    """A BERT model ready to run, and the tokenizer that belongs to it."""

    model: BERT
    tokenizer: Tokenizer
    max_positions: int

    def encode(self, text: str) -> list[int]:
        """The text's tokens between [CLS] and [SEP]."""
        found, cls, sep = self.tokenizer.encode(text), self.tokenizer.cls, self.tokenizer.sep
        if cls is not None and sep is not None and (not found or found[0] != cls):
            found = [cls, *found, sep]
        return self.check(found)

    def check(self, tokens: list[int]) -> list[int]:
        """The tokens, if the model can read them."""
        if len(tokens) > self.max_positions:
            raise HoldfastError(
                f"the text has {len(tokens)} tokens, but the model's positions end at {self.max_positions}; shorten it"
            )
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.model.vocab_size:
            raise HoldfastError(f"the token ids must be at least one, from 0 to {self.model.vocab_size - 1}")
        return tokens

    @torch.no_grad()
    def hidden(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Hidden states [B, T, H] of a padded batch, and where it has tokens [B, T]."""
        device, longest = next(self.model.parameters()).device, max(map(len, tokens))
        padded = [[*ids, *[self.tokenizer.pad or 0] * (longest - len(ids))] for ids in tokens]
        present = torch.tensor([[column < len(ids) for column in range(longest)] for ids in tokens], device=device)
        return self.model.hidden(torch.tensor(padded, device=device), present), present


@dataclass(frozen=True)
class Prediction:
    """A token in place of a mask. `text` is the text with that mask replaced."""

    token: str
    token_id: int
    probability: float
    text: str


def load_bert(
    path: str | Path, tokenizer: Mapping[str, str | None] | None = None, source: Model | None = None
) -> LoadedBERT:
    """Loads a BERT model, as `load_model` loads a GPT model."""
    source = source or read_source(path)
    arch = source.architecture
    if arch.model_type != "bert" or arch.token_types != TOKEN_TYPES:
        raise HoldfastError(f"{path} holds no BERT model with {TOKEN_TYPES} token types; --fill-mask needs one")
    chosen = belonging_tokenizer(source, Path(path), tokenizer or {})
    device, dtype = choose_device()
    model = build_empty(BERT, source, chosen, device, dtype)
    model.lm_head.approximate = "tanh" if arch.head_activation == "gelu_tanh" else "none"
    return LoadedBERT(fill(model, source, dtype), chosen, arch.max_position_embeddings)


def fill_mask(
    model: str | Path | LoadedBERT,
    texts: str | Sequence[str],
    *,
    top_k: int = 5,
    tokenizer: Mapping[str, str | None] | None = None,
) -> list[list[list[Prediction]]]:
    """The `top_k` likeliest tokens for each mask of each text."""
    if top_k < 1:
        raise UsageError(f"top_k {top_k}: give 1 or more")
    loaded = model if isinstance(model, LoadedBERT) else load_bert(model, tokenizer=tokenizer)
    texts = [texts] if isinstance(texts, str) else list(texts)
    if loaded.tokenizer.mask is None:
        raise HoldfastError("the model's tokenizer has no mask token")
    name = loaded.tokenizer.decode([loaded.tokenizer.mask])
    tokens = [loaded.encode(text) for text in texts]
    for text, ids in zip(texts, tokens, strict=True):
        if not text.count(name) or text.count(name) != ids.count(loaded.tokenizer.mask):
            raise UsageError(f"{text!r} has no {name}: write {name} where a token is to be predicted")
    found = []
    for first in range(0, len(texts), ROWS):
        part = slice(first, first + ROWS)
        hidden, _ = loaded.hidden(tokens[part])
        for row, text, ids in zip(hidden, texts[part], tokens[part], strict=True):
            found.append(_predictions(loaded, row, ids, text.split(name), name, top_k))
    return found


@torch.no_grad()
def _predictions(
    loaded: LoadedBERT, hidden_TH: Tensor, ids: Sequence[int], pieces: Sequence[str], mask: str, top_k: int
) -> list[list[Prediction]]:
    """The best tokens of each mask of one text; `pieces` is the text split at its masks."""
    places = [place for place, token in enumerate(ids) if token == loaded.tokenizer.mask]
    logits_PV = loaded.model.logits(hidden_TH[None])[0][0, places]
    best = logits_PV.float().softmax(-1).topk(min(top_k, logits_PV.shape[-1]))
    found = []
    for number, (shares, tokens) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        before, after = mask.join(pieces[: number + 1]), mask.join(pieces[number + 1 :])
        words = [loaded.tokenizer.decode([token]) for token in tokens]
        entries = zip(words, tokens, shares, strict=True)
        found.append([Prediction(word, token, share, before + word + after) for word, token, share in entries])
    return found


def embed(loaded: LoadedBERT, tokens: Sequence[Sequence[int]]) -> Tensor:
    """A vector of length 1 for each text [B, H]: the mean of its tokens' last hidden states."""
    vectors = []
    for first in range(0, len(tokens), ROWS):
        hidden, present = loaded.hidden(tokens[first : first + ROWS])
        weights = present[..., None].float()
        mean = (hidden.float() * weights).sum(1) / weights.sum(1)
        vectors.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
    return torch.cat(vectors)
