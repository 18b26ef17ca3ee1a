"""Reads prompts into slots. On CUDA the pass over short prompts is recorded as a graph per shape, as the steps are.

Shapes: P prompts, T tokens with padding, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.generation.cache import ALIGNMENT, SlotCache
from holdfast.generation.model_step import read_padded, read_prompts
from holdfast.models.gpt import GPT

# A pass over more tokens keeps the device busy longer than the host needs to launch it.
RECORDED_TOKENS = 4096
# Graphs in memory; further shapes are not recorded.
MAX_GRAPHS = 16


class PromptReader:
    """Reads prompts of up to `length` tokens into the slots of one cache."""

    def __init__(self, model: GPT, cache: SlotCache, length: int) -> None:
        self._model, self._cache, self._length = model, cache, length
        self._passes: dict[tuple[int, int], RecordedPass] = {}
        self._pool: Any = None

    def __call__(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """The logits (P, V) of the token after each prompt; prompt i goes into the slots `slots[i]`."""
        longest = max(len(prompt) for prompt in prompts)
        padded = min(-(-longest // ALIGNMENT) * ALIGNMENT, self._length)
        shape = (len(prompts), padded)
        device = self._cache.keys_NBGSD.device
        known = shape in self._passes or len(self._passes) < MAX_GRAPHS
        alone = all(len(several) == 1 for several in slots)
        if device.type != "cuda" or not alone or not known or len(prompts) * padded > RECORDED_TOKENS:
            return read_prompts(self._model, prompts, slots, self._cache)
        if shape not in self._passes:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._passes[shape] = RecordedPass(self._model, self._cache, *shape, self._pool)
        return self._passes[shape](prompts, [slot for several in slots for slot in several])


class RecordedPass:
    """A pass over P prompts of up to T tokens: run and recorded at its first use, then replayed."""

    def __init__(self, model: GPT, cache: SlotCache, prompts: int, tokens: int, pool: Any) -> None:
        device = cache.keys_NBGSD.device
        self._model, self._cache, self._sizes = model, cache, (prompts, tokens)
        self._inputs = torch.zeros(prompts * (tokens + 2), dtype=torch.int64, device=device)
        self._rows = torch.arange(prompts, device=device)
        self._pool, self._graph, self._logits = pool, torch.cuda.CUDAGraph(), torch.empty(0)

    def __call__(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        length = self._sizes[1]
        padded = [token for prompt in prompts for token in (*prompt, *[0] * (length - len(prompt)))]
        values = torch.tensor([*padded, *(len(prompt) - 1 for prompt in prompts), *slots])
        self._inputs.copy_(values.pin_memory(), non_blocking=True)
        if len(self._logits):
            self._graph.replay()
            return self._logits
        logits = self._read()  # fills the caches of libraries, which recording must not
        torch.cuda.synchronize()
        # Records without running. Other threads, such as the engine of a second model, may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            self._logits = self._read()
        return logits

    def _read(self) -> Tensor:
        count, length = self._sizes
        tokens, ends, places = self._inputs.split((count * length, count, count))
        layers = self._cache.reading_into(places, self._rows)
        return read_padded(self._model, tokens.view(count, length), ends, layers)
