"""The next token from logits: greedy, or drawn after temperature, top-k and top-p, in that order, as Hugging Face does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0 and top_p 1 leave everything in."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UsageError(f"temperature {self.temperature}: give 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k}: give 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p}: give a share between 0 and 1")


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that the next token is drawn from."""
    logits = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        # a token stays while those more likely than it do not yet reach top_p; the first one always stays
        dropped = (before >= sampling.top_p).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits.softmax(-1)


def next_token(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token id per row."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    return torch.multinomial(probabilities(logits_BV, sampling), 1, generator=generator).squeeze(1)
