"""Generation, from prompts as text to completions as text: all at once, or as a stream."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.generation.loading import LoadedModel, load_model
from holdfast.generation.model_step import WeightType
from holdfast.generation.requests import Emission, FinishReason, GenerationRequest, Logprobs
from holdfast.generation.sampling import Sampling, sequence_seed
from holdfast.generation.slots import SlotEngine
from holdfast.system.errors import UsageError
from holdfast.system.progress import log

# Sequences in one batch.
ROWS = 64


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation; `text` is both."""

    prompt: str
    completion: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason = "length"
    """stop: the end-of-document token or a stop string; length: max_new_tokens or the model's positions."""
    logprobs: tuple[Logprobs, ...] | None = None
    """Of each token, if they were asked for."""
    time_to_first_token_s: float = field(default=0.0, compare=False)
    """From the start of the call, with the model loaded."""
    tokens_per_s: float = field(default=0.0, compare=False)
    """This text's tokens over the time from the start of the call to its end."""

    @property
    def text(self) -> str:
        return self.prompt + self.completion


def generate(
    model: str | Path | LoadedModel,
    prompts: str | Sequence[str] | None = None,
    *,
    max_new_tokens: int = 64,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 1234,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    sliding_window: bool = False,
    speculate: str | Path | LoadedModel | None = None,
    compile: bool = False,
    weights: WeightType | None = None,
    tokenizer: Mapping[str, str | None] | None = None,
) -> list[Completion]:
    """Completions of each prompt, in order, from a Hugging Face folder, a run, a checkpoint, or a model already loaded.

    Without prompts a text starts from the end-of-document token. A text ends before a string of `stop`. `logprobs` asks for the
    log-probability of each token and of so many likeliest tokens. `sliding_window` lets a text be longer than the model's
    positions. `speculate` is "ngram" or a smaller model with the same tokenizer, whose guesses the model checks several at a
    time; the texts stay the same. `compile` compiles the layers first, which pays off for long or many texts. `weights` writes
    tokens with 8-bit copies of the matrices. `tokenizer` has the keys vocab_file, merge_file, tokenizer_model and
    tokenizer_type, for a model that names no tokenizer.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    wanted = GenerationRequest((), max_new_tokens, sampling, seed, stops, logprobs, sliding_window)
    loaded = model if isinstance(model, LoadedModel) else load_model(model, tokenizer=tokenizer, weights=weights)
    if compile:
        loaded.compile()
    texts = [prompts] if isinstance(prompts, str) else [""] if prompts is None else list(prompts)
    requests = spread(loaded, texts, num_return_sequences, wanted)
    writing = Completions([text for text in texts for _ in range(num_return_sequences)])
    for number, emission in stream(loaded, requests, speculate):
        writing.add(number, emission)
    return writing.all()


def spread(
    loaded: LoadedModel, texts: Sequence[str], copies: int, wanted: GenerationRequest
) -> list[GenerationRequest]:
    """`copies` requests for each text, each with a seed of its own."""
    if copies < 1:
        raise UsageError(f"num_return_sequences {copies}: give 1 or more")
    return [
        replace(wanted, prompt=prompt, seed=sequence_seed(wanted.seed, number, copy))
        for number, prompt in enumerate(tuple(loaded.encode(text)) for text in texts)
        for copy in range(copies)
    ]


def stream(
    loaded: LoadedModel, requests: Sequence[GenerationRequest], speculate: str | Path | LoadedModel | None = None
) -> Iterator[tuple[int, Emission]]:
    """Yields the number of a request and its newest emission, as tokens are generated.

    A request that cannot be served raises here, before anything is written.
    """
    engine = _borrow_engine(loaded, requests, speculate)
    numbers = {engine.submit(request): number for number, request in enumerate(requests)}
    return _run(loaded, engine, numbers, speculated=speculate is not None)


def _run(
    loaded: LoadedModel, engine: SlotEngine, numbers: Mapping[int, int], speculated: bool
) -> Iterator[tuple[int, Emission]]:
    while engine.has_work:
        for emission in engine.step():
            yield numbers[emission.id], emission
    if speculated:
        log(f"speculation: {engine.accepted:,} of {engine.guessed:,} guesses accepted")
    else:
        loaded.spare[:] = [engine]


class Completions:
    """Collects the emissions of texts."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts, self._start = prompts, time.perf_counter()
        self._emissions: list[list[Emission]] = [[] for _ in prompts]
        self._first, self._last = [0.0] * len(prompts), [0.0] * len(prompts)

    def add(self, number: int, emission: Emission) -> None:
        self._last[number] = time.perf_counter() - self._start
        self._first[number] = self._first[number] or self._last[number]
        self._emissions[number].append(emission)

    def all(self) -> list[Completion]:
        return [self._completion(number) for number in range(len(self._prompts))]

    def _completion(self, number: int) -> Completion:
        emissions = self._emissions[number]
        tokens = tuple(emission.token for emission in emissions if emission.token is not None)
        logprobs = tuple(emission.logprobs for emission in emissions if emission.logprobs is not None)
        reason = emissions[-1].finish_reason
        assert reason is not None
        return Completion(
            self._prompts[number],
            "".join(emission.text for emission in emissions),
            tokens,
            reason,
            logprobs or None,
            self._first[number],
            len(tokens) / self._last[number],
        )


def _borrow_engine(
    loaded: LoadedModel, requests: Sequence[GenerationRequest], speculate: str | Path | LoadedModel | None
) -> SlotEngine:
    """An engine with room for the requests: the model's spare one if it is large enough, or a new one."""
    longest = max((len(request.prompt) for request in requests), default=0)
    wanted = max((len(request.prompt) + request.max_new_tokens for request in requests), default=1)
    room = loaded.max_positions - longest
    if wanted > loaded.max_positions and room > 0 and not any(request.sliding_window for request in requests):
        log(
            f"the model's positions allow {room} more tokens after the longest prompt; --sliding-window lets a text continue"
        )
    slots = min(ROWS, max(1, len(requests)))
    length = min(wanted, loaded.max_positions)
    if speculate is not None:
        return SlotEngine(loaded, slots, length, speculate=speculate)
    try:
        spare: SlotEngine = loaded.spare.pop()
    except IndexError:
        return SlotEngine(loaded, slots, length)
    return spare if spare.slots >= slots and spare.length >= length else SlotEngine(loaded, slots, length)
