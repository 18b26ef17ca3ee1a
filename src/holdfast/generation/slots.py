"""Continuous batching: requests join and leave between steps, each in a slot of one static cache.

A step feeds every occupied slot its newest token; then requests that wait are read into free slots, several prompts in one
pass. No step waits for a value from the device: tokens, positions and parameters have fixed addresses there, so that on CUDA a
step is recorded once as a graph and replayed, also by later calls. On CUDA the host reads the tokens of a step only after it has
launched the next one (`lookahead`); a step too many for a request that has ended is ignored.

The invariant: a request's tokens depend on its own prompt, parameters and seed, never on the other slots. A free slot computes
too, and what it writes is overwritten by the next prompt.

Shapes: B slots, K alternatives.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.generation.cache import ALIGNMENT, SlotCache
from holdfast.generation.loading import LoadedModel
from holdfast.generation.model_step import DecodeStep, choose_step, is_compiled
from holdfast.generation.prompt_reading import PromptReader
from holdfast.generation.requests import Emission, GenerationRequest, Logprobs, RunningRequest
from holdfast.generation.sampling import SamplingRows, Steps, likeliest, next_tokens, round_up
from holdfast.generation.speculation import GUESSES, SlotText, build_proposer, check_guesses
from holdfast.generation.text_stream import TextStream

# Tokens, with padding, that one pass over joining prompts reads at most (a longer prompt is read alone).
READ_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 12}


@dataclass(frozen=True)
class Launch:
    """Results of one step on their way to the host."""

    requests: list[RunningRequest]
    rows: list[int]
    """Row of each request in the tensors."""
    tokens_B: Tensor
    logprobs: tuple[Tensor, ...] = ()
    """Of the chosen tokens (B), ids (B, K) and values (B, K) of the likeliest."""
    arrived: torch.cuda.Event | None = None

    def wait(self) -> list[tuple[RunningRequest, int, Logprobs | None]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens_B.tolist()
        lists = [part.tolist() for part in self.logprobs]
        return [
            (request, tokens[row], Logprobs.of_row(lists, row, request.request.logprobs))
            for request, row in zip(self.requests, self.rows, strict=True)
        ]


class SlotEngine:
    """Generates for up to `slots` requests at a time; the others wait in order. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        loaded: LoadedModel,
        slots: int,
        length: int | None = None,
        *,
        step: DecodeStep | None = None,
        speculate: str | Path | LoadedModel | None = None,
        lookahead: int | None = None,
    ) -> None:
        """`length`: tokens of the longest sequence, prompt included; unset: the model's positions. `speculate`: "ngram", or a
        draft model (its path, or loaded)."""
        device = loaded.device
        self.slots, self.length = slots, min(length or loaded.max_positions, loaded.max_positions)
        self.vocabulary = loaded.model.vocab_size
        self._model, self._tokenizer, self._ends = loaded.model, loaded.tokenizer, loaded.ends
        self._proposer = None if speculate is None else build_proposer(speculate, loaded, slots, self.length)
        self._step = step or choose_step(loaded.model, loaded.weights)
        self._compiled = is_compiled(loaded.model)
        self._lookahead = int(device.type == "cuda") if lookahead is None else lookahead
        if self._proposer:
            self._lookahead = 0  # the next guess needs the tokens
        self.guessed, self.accepted = 0, 0
        self._cache = SlotCache(loaded.model.config, slots, self.length, loaded.model.dtype, device)
        self._read_prompts = PromptReader(loaded.model, self._cache, self.length)
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._draws = torch.zeros(slots, dtype=torch.float64, device=device)
        self._sampling = SamplingRows(slots, self.vocabulary, device)
        self._occupied: list[RunningRequest | None] = [None] * slots
        self._waiting: deque[RunningRequest] = deque()
        self._pending: deque[Launch] = deque()
        self._ended: list[Emission] = []
        self._graphs: dict[tuple[int, int, Steps, int | None], Callable[[], tuple[Tensor, ...]]] = {}
        self._pool: Any = None
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._pending or self._ended or any(self._occupied))

    @property
    def active(self) -> int:
        """Requests in slots."""
        return sum(request is not None for request in self._occupied)

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> int:
        """Queues a request and returns its id, which is new for every request of this engine."""
        request.check(self.length, self.vocabulary)
        self._next_id += 1
        if not request.prompt:
            request = replace(request, prompt=(self._tokenizer.eod or 0,))
        stream = TextStream(self._tokenizer.decode, request.stop, self._tokenizer.byte_tokens, request.text_seconds)
        room = request.max_new_tokens if request.sliding_window else self.length - len(request.prompt)
        context = self._window([*request.prompt])
        running = RunningRequest(self._next_id, request, stream, context, min(request.max_new_tokens, room))
        self._waiting.append(running)
        return self._next_id

    def cancel(self, id: int) -> None:
        """Ends a request; the next step reports it. Has no effect on a request that has ended."""
        for request in [*self._waiting, *filter(None, self._occupied)]:
            if request.id == id and request.finish_reason is None:
                self._ended.append(request.end("cancelled"))
        self._waiting = deque(request for request in self._waiting if request.id != id)
        self._free_ended()

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """Writes a token for every request that has a slot, lets waiting requests join, and returns the new emissions."""
        emissions, self._ended = self._ended, []
        self._compact()
        rows = [
            slot
            for slot, request in enumerate(self._occupied)
            if request and request.launched < request.limit and request.position < self.length
        ]
        guesses = self._guess(rows) if self._proposer and rows else []
        if any(guesses):
            emissions += self._check(rows, guesses)
        elif rows:
            self._pending.append(self._launch(rows))
        while len(self._pending) > (self._lookahead if rows else 0):
            emissions += self._collect(self._pending.popleft())
        emissions += self._join()
        return emissions

    def _launch(self, slots: list[int]) -> Launch:
        """Feeds the occupied slots their newest tokens and chooses the next ones."""
        requests = [request for request in (self._occupied[slot] for slot in slots) if request]
        count = max(slots) + 1
        if self._tokens.is_cuda:  # few different numbers, since each has its own graph
            count = min(self.slots, 1 << (count - 1).bit_length())
        span = self._span(max(request.position for request in requests))
        steps, alternatives = _needs(requests)
        if steps.draws:
            draws = torch.zeros(count, dtype=torch.float64)
            draws[slots] = torch.tensor([request.next_draws(1)[0] for request in requests], dtype=torch.float64)
            self._draws[:count].copy_(draws)
        results = self._advance(count, span, steps, alternatives)
        for request in requests:
            request.launched += 1
            request.position += 1
        return self._send(requests, slots, results)

    def _texts(self, slots: list[int]) -> list[SlotText]:
        requests = [request for request in (self._occupied[slot] for slot in slots) if request]
        return [SlotText(slot, request) for slot, request in zip(slots, requests, strict=True)]

    def _guess(self, slots: list[int]) -> list[list[int]]:
        """The proposer's guesses for each slot, none where the positions end."""
        texts = self._texts(slots)
        count = min(GUESSES, self.length - 1 - max(text.request.position for text in texts))
        return self._proposer.propose(texts, count, self._sampling) if self._proposer and count > 0 else []

    def _check(self, slots: list[int], guesses: list[list[int]]) -> list[Emission]:
        """Feeds the newest tokens and the guesses in one pass; every slot gets the guesses that are right, and one token more."""
        texts = self._texts(slots)
        last = max(text.request.position for text in texts) + max(map(len, guesses))
        steps, alternatives = _needs([text.request for text in texts])
        rows = self._sampling.rows(slice(0, max(slots) + 1))
        found = check_guesses(self._model, self._cache, self._span(last), texts, guesses, rows, steps, alternatives)
        emissions = []
        for text, accepted in zip(texts, found, strict=True):
            request, tokens = text.request, [token for token, _ in accepted]
            for token, logprobs in accepted:
                if request.finish_reason is None:
                    request.launched += 1
                    request.position += 1
                    emissions.append(request.receive(token, logprobs, self._ends))
            self._tokens[text.slot] = tokens[-1]
            self._positions[text.slot] = min(request.position, self.length - 1)
            self._sampling.mark(slice(text.slot, text.slot + 1), torch.tensor(tokens, device=self._tokens.device))
            if request.finish_reason is None and request.position >= self.length:
                self._slide(request)
        self.guessed += sum(map(len, guesses))
        self.accepted += sum(len(accepted) - 1 for accepted in found)
        self._free_ended()
        return emissions

    def _span(self, position: int) -> int:
        """Entries to attend to: few different numbers where each has its own graph or compilation."""
        needed = -(-(position + 1) // ALIGNMENT) * ALIGNMENT
        if self._tokens.is_cuda or self._compiled:
            needed = max(256, 1 << (needed - 1).bit_length())
        return min(needed, self._cache.length)

    def _advance(self, count: int, span: int, steps: Steps, alternatives: int | None) -> tuple[Tensor, ...]:
        """One step of the first `count` slots; on CUDA recorded at the second use of a combination and replayed from then on."""
        if not self._tokens.is_cuda:
            return self._compute(count, span, steps, alternatives)
        key = (count, span, steps, alternatives)
        replay = self._graphs.get(key)
        if replay is None:  # the first call runs eagerly: it compiles kernels and fills library caches
            self._graphs[key] = lambda: self._record(key)
            return self._compute(*key)
        return replay()

    def _record(self, key: tuple[int, int, Steps, int | None]) -> tuple[Tensor, ...]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        # Records without running. Other threads, such as the engine of a second model, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = self._compute(*key)

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        self._graphs[key] = replay
        return replay()

    def _compute(self, count: int, span: int, steps: Steps, alternatives: int | None) -> tuple[Tensor, ...]:
        rows = slice(0, count)
        tokens, positions = self._tokens[rows], self._positions[rows]
        # a free slot may be further on than the occupied ones
        logits = self._step(tokens, positions.clamp(max=span - 1), self._cache, span)
        results = _choose(logits, self._sampling.rows(rows), steps, self._draws[rows], alternatives)
        if steps.penalty:
            self._sampling.mark(rows, results[0])
        tokens.copy_(results[0])
        # a free slot goes on, but not beyond the last position
        positions.add_(1).clamp_(max=self.length - 1)
        return results

    def _join(self) -> list[Emission]:
        """Reads waiting prompts into free slots in one pass, equal prompts once."""
        prompts: dict[tuple[int, ...], list[int]] = {}
        longest = 0
        while self._waiting and None in self._occupied:
            context = tuple(self._waiting[0].context)
            longest = max(longest, len(context))
            rows = len(prompts) + (context not in prompts)
            if prompts and rows * longest > READ_TOKENS[self._tokens.device.type]:
                break
            slot = self._occupied.index(None)
            self._occupied[slot] = self._waiting.popleft()
            prompts.setdefault(context, []).append(slot)
        if not prompts:
            return []
        launch = self._read(prompts)
        if not self._lookahead:
            return self._collect(launch)
        self._pending.append(launch)
        return []

    def _read(self, prompts: dict[tuple[int, ...], list[int]]) -> Launch:
        slots = [slot for several in prompts.values() for slot in several]
        requests = [request for request in (self._occupied[slot] for slot in slots) if request]
        for slot, request in zip(slots, requests, strict=True):
            self._sampling.set(slot, request.request.sampling, [*request.request.prompt, *request.tokens])
            request.position = len(request.context)
        logits = self._read_prompts(list(prompts), list(prompts.values()))
        device = logits.device
        copies = torch.tensor([len(several) for several in prompts.values()], device=device)
        places = torch.tensor(slots, device=device)
        steps, alternatives = _needs(requests)
        draws = torch.tensor([request.next_draws(1)[0] for request in requests], dtype=torch.float64, device=device)
        logits = logits.repeat_interleave(copies, dim=0)
        results = _choose(logits, self._sampling.rows(places), steps, draws, alternatives)
        if steps.penalty:
            self._sampling.mark(places, results[0])
        self._tokens[places] = results[0]
        self._positions[places] = torch.tensor([request.position for request in requests], device=device)
        for request in requests:
            request.launched += 1
        return self._send(requests, list(range(len(requests))), results)

    def _send(self, requests: list[RunningRequest], rows: list[int], results: tuple[Tensor, ...]) -> Launch:
        """Starts the copy of the results to the host."""
        if not self._tokens.is_cuda:
            return Launch(requests, rows, results[0], results[1:])
        copies = [torch.empty_like(part, device="cpu", pin_memory=True) for part in results]
        for copy, part in zip(copies, results, strict=True):
            copy.copy_(part, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launch(requests, rows, copies[0], tuple(copies[1:]), arrived)

    def _collect(self, launch: Launch) -> list[Emission]:
        emissions = []
        for request, token, logprobs in launch.wait():
            if request.finish_reason is None:
                emissions.append(request.receive(token, logprobs, self._ends))
                if request.finish_reason is None and request.position >= self.length:
                    self._slide(request)
        self._free_ended()
        return emissions

    def _slide(self, request: RunningRequest) -> None:
        """Continues a sequence that has filled the positions from its newest tokens, which are read again."""
        if len(request.tokens) == request.launched:
            request.set_context(self._window([*request.request.prompt, *request.tokens]))
            self._occupied[self._occupied.index(request)] = None
            self._waiting.appendleft(request)

    def _window(self, tokens: list[int]) -> list[int]:
        """The newest half of the positions, for a sequence that has filled them."""
        return tokens if len(tokens) < self.length else tokens[-(self.length // 2) :]

    def _compact(self) -> None:
        """Moves requests to lower slots where a step then computes at most half as many rows."""
        occupied = [slot for slot, request in enumerate(self._occupied) if request]
        needed = 1 << max(len(occupied) - 1, 0).bit_length()
        if not occupied or max(occupied) + 1 < 2 * needed:
            return
        for slot in [slot for slot in occupied if slot >= needed]:
            request, free = self._occupied[slot], self._occupied.index(None)
            assert request is not None
            for entries in (self._cache.keys_NBGSD, self._cache.values_NBGSD):
                entries[:, free, :, : request.position] = entries[:, slot, :, : request.position]
            for state in (self._tokens, self._positions):
                state[free] = state[slot]
            self._sampling.move(slot, free)
            self._occupied[slot], self._occupied[free] = None, request

    def _free_ended(self) -> None:
        self._occupied = [
            None if request and request.finish_reason is not None else request for request in self._occupied
        ]


def _needs(requests: Sequence[RunningRequest]) -> tuple[Steps, int | None]:
    """What the requests' rows need: sampling steps, and how many likeliest tokens at least (None: no log-probabilities)."""
    wanted = [request.request.logprobs for request in requests if request.request.logprobs is not None]
    return Steps.of([request.request.sampling for request in requests]), round_up(max(wanted)) if wanted else None


def _choose(
    logits_BV: Tensor, rows: SamplingRows, steps: Steps, draws_B: Tensor, alternatives: int | None
) -> tuple[Tensor, ...]:
    """The next tokens, and if wanted their log-probabilities and the ids and values of the likeliest."""
    chosen = next_tokens(logits_BV, rows, steps, draws_B)
    if alternatives is None:
        return (chosen,)
    return chosen, *likeliest(logits_BV, chosen, alternatives)
