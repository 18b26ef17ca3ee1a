"""Sequences while they are being written: prompts read at once, then a token for every sequence per step.

Everything that a step reads or changes has a fixed address, and a step never waits for a value from the device. So on CUDA the
step is recorded once as a graph and replayed, which saves the host all kernel launches; on the CPU the same function is called.

Shapes: B sequences, L tokens to write, S length of the cache, H hidden.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.generation.cache import build_caches
from holdfast.generation.sampling import Sampling, next_token
from holdfast.models.gpt import GPT

# Steps between checks whether all sequences have ended. On CUDA a check waits for the device.
CHECK_EVERY = {"cuda": 32}
# Recording takes the time of some steps.
MIN_RECORDED_STEPS = 8


class Sequences:
    """The sequences that continue some prompts, `copies` of each."""

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        draws_BL: Tensor,
        sampling: Sampling,
        *,
        copies: int,
        max_positions: int,
    ) -> None:
        device = next(model.parameters()).device
        self._model, self._sampling, self._prompts = model, sampling, prompts
        self._limit = draws_BL.shape[1]
        self._draws = draws_BL.to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(copies)
        self._positions = lengths.to(device)
        length = min(int(lengths.max()) + self._limit, max_positions)
        self._last = length - 1
        self._caches = build_caches(model.config, length, self._positions, model.dtype)
        self._columns = torch.arange(self._caches[0].length, device=device)
        self._tokens = torch.zeros_like(self._positions)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._written = torch.zeros_like(self._draws, dtype=torch.int64)

    @torch.no_grad()
    def write(self, wanted: Sequence[int], eod: int | None) -> list[list[int]]:
        """The tokens of each sequence up to the end-of-document token, `wanted` of them at most."""
        self._read()
        done = 1
        check_every = CHECK_EVERY.get(self._positions.device.type, 1)
        advance: Callable[[], None] = self._step
        while done < self._limit:
            if done % check_every == 0 and self._all_ended(done, wanted, eod):
                break
            if done == 3 and self._positions.is_cuda and self._limit - done >= MIN_RECORDED_STEPS:
                advance = self._record()
            advance()
            done += 1
        rows = self._written[:, :done].tolist()
        return [_until(row[:most], eod) for row, most in zip(rows, wanted, strict=True)]

    def _read(self) -> None:
        """Reads the prompts, padded to the longest behind their ends: nothing attends to what comes after it."""
        device = self._positions.device
        longest = max(len(prompt) for prompt in self._prompts)
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in self._prompts]
        with torch.compiler.set_stance("force_eager"):  # a shape that never comes back
            hidden = self._model.hidden(torch.tensor(padded, device=device), caches=self._caches)
        for cache in self._caches:
            cache.reading = False
        ends = torch.tensor([len(prompt) - 1 for prompt in self._prompts], device=device)
        last = hidden[torch.arange(len(self._prompts), device=device), ends]
        self._choose(last.repeat_interleave(len(self._positions) // len(self._prompts), dim=0))

    def _step(self) -> None:
        """Feeds every sequence its newest token and chooses the next one."""
        unwritten = (self._columns > self._positions[:, None])[:, None, None]
        mask = torch.zeros_like(unwritten, dtype=self._model.dtype).masked_fill(unwritten, -torch.inf)
        hidden = self._model.hidden(self._tokens[:, None], self._positions[:, None], caches=self._caches, mask=mask)
        # a sequence that has reached the model's last position stays there; its tokens are ignored
        self._positions.add_(1).clamp_(max=self._last)
        self._choose(hidden[:, -1])

    def _choose(self, hidden_BH: Tensor) -> None:
        draws = self._draws.index_select(1, self._count).squeeze(1)
        chosen = next_token(self._model.logits(hidden_BH), self._sampling, draws)
        self._written.index_copy_(1, self._count, chosen[:, None])
        self._tokens.copy_(chosen)
        self._count.add_(1)

    def _record(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):  # records without running
            self._step()
        return graph.replay

    def _all_ended(self, done: int, wanted: Sequence[int], eod: int | None) -> bool:
        full = torch.tensor([done >= most for most in wanted])
        if eod is not None:
            full |= (self._written[:, :done] == eod).any(1).cpu()
        return bool(full.all())


def _until(tokens: list[int], eod: int | None) -> list[int]:
    return tokens[: tokens.index(eod)] if eod in tokens else tokens
