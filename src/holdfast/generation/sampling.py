"""The next token from logits: greedy, or drawn after temperature, top-k and top-p, in that order, as Hugging Face does.

A draw is a function of the logits and of one number between 0 and 1: where that number falls among the cumulated probabilities.
The numbers come from (seed, prompt, sequence) alone, so that a text does not depend on what is written beside it.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.system.errors import UsageError


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
        ordered, order = logits.softmax(-1).sort(descending=True)
        # a token stays while those more likely than it do not yet reach top_p; so the first one always stays
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return logits.softmax(-1)


def next_token(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """One token id per row; `draws_B` are numbers in [0, 1), one per row."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    cumulated = probabilities(logits_BV, sampling).double().cumsum(-1)
    wanted = draws_B.double()[:, None] * cumulated[:, -1:]
    # right: a token of probability 0 adds nothing, and what lies on a border belongs to the token after it
    return torch.searchsorted(cumulated, wanted, right=True).squeeze(1)


def draw(seed: int, prompt: int, sequence: int, count: int) -> Tensor:
    """The numbers in [0, 1) that a sequence's tokens are drawn with: multiples of 2⁻³², so that no product rounds up to 1."""
    digest = hashlib.blake2b(f"{seed}:{prompt}:{sequence}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    return torch.randint(1 << 32, (count,), generator=generator).double() / 2**32
