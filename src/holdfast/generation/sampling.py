"""The next token from logits: greedy, or drawn after repetition penalty, temperature, top-k, top-p and min-p, in this order.

Every row of a batch has its own parameters, kept as tensors. A draw is a function of the logits and of one number between 0
and 1: where that number falls among the cumulated probabilities. The numbers come from a sequence's seed and the position alone,
so that a text does not depend on what is written beside it.

Shapes: B rows, V vocabulary, K alternatives.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.system.errors import UsageError

# Beyond these a distribution in fp32 has no probabilities left, or infinite logits.
MIN_TEMPERATURE, MIN_TOP_P, MAX_PENALTY = 1e-4, 1e-6, 100.0


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature}: give 0 (greedy) or at least {MIN_TEMPERATURE}")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k}: give 0 (all tokens) or more")
        if not MIN_TOP_P <= self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p}: give a share between {MIN_TOP_P} and 1")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p {self.min_p}: give a share between 0 and 1")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise UsageError(
                f"repetition_penalty {self.repetition_penalty}: give a factor from {1 / MAX_PENALTY} to {MAX_PENALTY} "
                "(1 changes nothing)"
            )


GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Steps:
    """The computations that the rows of one batch need; the host knows them, so no step waits for a value from the device."""

    draws: bool = False
    top_k: int = 0
    """At least the largest k of the rows: a power of two, so that few combinations need a recorded step of their own."""
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False

    @staticmethod
    def of(rows: Sequence[Sampling]) -> "Steps":
        drawn = [row for row in rows if row.temperature > 0]
        return Steps(
            draws=bool(drawn),
            top_k=round_up(max((row.top_k for row in drawn), default=0)),
            top_p=any(row.top_p < 1 for row in drawn),
            min_p=any(row.min_p > 0 for row in drawn),
            penalty=any(row.repetition_penalty != 1 for row in rows),
        )


def round_up(number: int) -> int:
    """The next power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


class SamplingRows:
    """The parameters of each row, and for the repetition penalty the tokens that each row has seen."""

    def __init__(self, count: int, vocabulary: int, device: torch.device) -> None:
        self._count, self._vocabulary, self._device = count, vocabulary, device
        self.temperature_B = torch.ones(count, device=device)
        self.top_k_B = torch.zeros(count, dtype=torch.int64, device=device)
        self.top_p_B = torch.ones(count, device=device)
        self.min_p_B = torch.zeros(count, device=device)
        self.penalty_B = torch.ones(count, device=device)
        self._numbers = torch.arange(count, device=device)
        self.seen_BV: Tensor | None = None

    def set(self, row: int, sampling: Sampling, context: Sequence[int]) -> None:
        self.temperature_B[row] = sampling.temperature
        self.top_k_B[row] = min(sampling.top_k, self._vocabulary)
        self.top_p_B[row] = sampling.top_p
        self.min_p_B[row] = sampling.min_p
        self.penalty_B[row] = sampling.repetition_penalty
        if sampling.repetition_penalty != 1:
            if self.seen_BV is None:
                self.seen_BV = torch.zeros(self._count, self._vocabulary, dtype=torch.bool, device=self._device)
            self.seen_BV[row] = False
            self.seen_BV[row, torch.tensor(context, device=self._device)] = True

    def rows(self, indices: Tensor | slice) -> "SamplingRows":
        """The parameters of some rows; a slice gives views, indices give copies."""
        found = SamplingRows.__new__(SamplingRows)
        for name, value in vars(self).items():
            setattr(found, name, value[indices] if isinstance(value, Tensor) else value)
        return found

    def move(self, source: int, target: int) -> None:
        """Copies the parameters of one row to another."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "_numbers":
                value[target] = value[source]

    def mark(self, indices: Tensor | slice, tokens_B: Tensor) -> None:
        """Records the newest token of some rows for the repetition penalty."""
        if self.seen_BV is not None:
            self.seen_BV[self._numbers[indices], tokens_B] = True


def next_tokens(logits_BV: Tensor, rows: SamplingRows, steps: Steps, draws_B: Tensor) -> Tensor:
    """One token id per row; `draws_B` are numbers in [0, 1), one per row."""
    logits = penalised(logits_BV, rows) if steps.penalty else logits_BV
    if not steps.draws:
        return largest(logits)
    cumulated = probabilities(logits, rows, steps).double().cumsum(-1)
    wanted = draws_B.double()[:, None] * cumulated[:, -1:]
    # right: a token of probability 0 adds nothing, and what lies on a border belongs to the token after it
    drawn = torch.searchsorted(cumulated, wanted, right=True).squeeze(1)
    drawn = drawn.clamp(max=logits.shape[-1] - 1)  # logits that are not numbers give an id all the same, not an error
    return torch.where(rows.temperature_B > 0, drawn, largest(logits))


def largest(logits_BV: Tensor) -> Tensor:
    """The likeliest token of each row; on CUDA by a kernel that divides a row over the device."""
    if logits_BV.is_cuda and kernels.available():
        from holdfast.kernels.greedy import argmax

        return argmax(logits_BV)
    return logits_BV.argmax(-1)


def penalised(logits_BV: Tensor, rows: SamplingRows) -> Tensor:
    """Logits of tokens that a row has seen, divided by its penalty, or multiplied where they are negative."""
    if rows.seen_BV is None:
        return logits_BV
    logits, penalty = logits_BV.float(), rows.penalty_B[:, None]
    return torch.where(rows.seen_BV, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(logits_BV: Tensor, rows: SamplingRows, steps: Steps) -> Tensor:
    """The distribution that each row's next token is drawn from; for a greedy row that of temperature 1."""
    temperature = torch.where(rows.temperature_B > 0, rows.temperature_B, 1)
    logits = logits_BV.float() / temperature[:, None]
    if steps.top_k:
        most = min(steps.top_k, logits.shape[-1])
        kth = logits.topk(most).values.gather(1, (rows.top_k_B - 1).clamp(0, most - 1)[:, None])
        logits = logits.masked_fill((logits < kth) & (rows.top_k_B[:, None] > 0), -torch.inf)
    if steps.top_p:
        ordered, order = logits.softmax(-1).sort(descending=True)
        # a token stays while those more likely than it do not yet reach top_p; so the first one always stays
        beyond = (ordered.cumsum(-1) - ordered >= rows.top_p_B[:, None]) & (rows.top_p_B[:, None] < 1)
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    found = logits.softmax(-1)
    if steps.min_p:
        unlikely = found < rows.min_p_B[:, None] * found.amax(-1, keepdim=True)
        found = logits.masked_fill(unlikely, -torch.inf).softmax(-1)
    return found


def likeliest(logits_BV: Tensor, chosen_B: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen tokens (B), and ids (B, K) and log-probabilities (B, K) of the likeliest."""
    values = logits_BV.float().log_softmax(-1)
    top = values.topk(min(count, values.shape[-1]))
    return values.gather(1, chosen_B[:, None])[:, 0], top.indices, top.values


def sequence_seed(seed: int, prompt: int, sequence: int) -> int:
    """The seed of one of several sequences that continue one of several prompts."""
    digest = hashlib.blake2b(f"{seed}:{prompt}:{sequence}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


def draw(seed: int, count: int) -> Tensor:
    """The numbers in [0, 1) that a sequence's tokens are drawn with: multiples of 2⁻³², so that no product rounds up to 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << 32, (count,), generator=generator).double() / 2**32
