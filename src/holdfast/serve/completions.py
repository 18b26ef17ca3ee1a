"""Answers of /v1/completions and /v1/chat/completions: whole, or as a stream of server-sent events.

Both endpoints run the same generation and differ in their JSON. A stream sends one event for all tokens that have arrived: a slow
client gets larger events and not a longer queue of them.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from holdfast.generation.requests import Emission, GenerationRequest
from holdfast.generation.sampling import Sampling, sequence_seed
from holdfast.serve.api_errors import ApiError, invalid
from holdfast.serve.counters import Counters
from holdfast.serve.engine_thread import Generation
from holdfast.serve.served_models import PARTIAL_TOKEN, GPTService
from holdfast.serve.text_requests import TextRequest

Json = dict[str, Any]
# Shortest time between two events of a stream. At a thousand tokens per second, an event costs more than a token.
EVENT_SECONDS = 0.01


@dataclass
class Choice:
    """One text of the answer. `text` and `tokens` are what has not been sent yet: a stream takes them event by event."""

    index: int
    text: list[str]
    length: int
    """Characters so far."""
    keeps_tokens: bool
    count: int = 0
    """Tokens so far."""
    tokens: list[tuple[int, Emission]] = field(default_factory=list)
    """Tokens, each with the number of characters before it, if the request wants log-probabilities."""
    finish_reason: str | None = None

    def receive(self, emission: Emission) -> None:
        if emission.token is not None:
            self.count += 1
            if self.keeps_tokens:
                self.tokens.append((self.length, emission))
        if emission.text:
            self.text.append(emission.text)
            self.length += len(emission.text)
        if emission.finish_reason is not None:
            self.finish_reason = emission.finish_reason

    def take(self) -> tuple[str, list[tuple[int, Emission]]]:
        """Text and tokens since the last call."""
        text, tokens = "".join(self.text), self.tokens
        self.text, self.tokens = [], []
        return text, tokens


class TextAnswer:
    """One request for text, from its submission to its last event."""

    def __init__(self, service: GPTService, request: TextRequest, counters: Counters, *, chat: bool) -> None:
        self._service, self._request, self._counters, self._chat = service, request, counters, chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created, self._begin = int(time.time()), time.monotonic()
        self._choices: list[Choice] = []
        self._prompt_tokens = 0
        self._generation: Generation | None = None

    async def submit(self) -> None:
        """Encodes the prompts and queues their sequences; raises ApiError if the request is wrong."""
        request = self._request
        prompts: Sequence[Any] = request.prompts
        if self._chat:
            if self._service.chat is None:
                raise invalid(
                    f"the model {self._service.name} has no chat template; use /v1/completions",
                    "model",
                    "no_chat_template",
                )
            prompts = [await self._service.chat.render(request.messages)]
        sampling = Sampling(
            request.temperature, request.top_k, request.top_p, request.min_p, request.repetition_penalty
        )
        # With log-probabilities each token comes with its text; otherwise one decoding for each event is enough.
        seconds = 0.0 if request.logprobs is not None else EVENT_SECONDS if request.stream else float("inf")
        sequences = []
        for number, prompt in enumerate(prompts):
            tokens, limit = await self._service.encode(prompt, request.max_tokens, chat=self._chat)
            self._prompt_tokens += len(tokens)
            echo = ""
            if request.echo:
                echo = prompt if isinstance(prompt, str) else self._service.decode(tokens)
            for copy in range(request.choices):
                seed = sequence_seed(request.seed, number, copy)
                sequences.append(
                    GenerationRequest(
                        tokens, limit, sampling, seed, request.stop, request.logprobs, text_seconds=seconds
                    )
                )
                self._choices.append(Choice(len(self._choices), [echo], len(echo), request.logprobs is not None))
        self._generation = self._service.engine.submit(sequences, request.stream)
        self._counters.add("prompt_tokens", self._prompt_tokens, model=self._service.name)

    async def whole(self) -> bytes:
        """The answer as one JSON object."""
        async for _ in self._arrivals():
            pass
        return orjson.dumps(self._object([self._choice(choice) for choice in self._choices]) | {"usage": self._usage()})

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events. An error after the first byte is an event too."""
        try:
            if self._chat:
                start = [{"index": one.index, "delta": {"role": "assistant", "content": ""}} for one in self._choices]
                for entry in start:
                    yield self._event([entry | {"logprobs": None, "finish_reason": None}])
            async for changed in self._arrivals():
                yield b"".join(self._event([self._choice(choice, streamed=True)]) for choice in changed)
                await asyncio.sleep(EVENT_SECONDS)
            if self._request.include_usage:
                yield self._event([], self._usage())
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield b"data: " + orjson.dumps(error.body()) + b"\n\n"

    async def _arrivals(self) -> AsyncIterator[list[Choice]]:
        """The choices that have changed, whenever tokens arrive, until all have ended."""
        assert self._generation is not None
        left, observed = len(self._choices), False
        while left:
            news = await self._generation.news()
            if not observed and self._generation.first_token is not None:
                self._counters.first_token.observe(self._generation.first_token - self._begin)
            observed, written = True, 0
            changed: dict[int, Choice] = {}
            for number, emission in news:
                self._choices[number].receive(emission)
                changed[number] = self._choices[number]
                written += emission.token is not None
                left -= emission.finish_reason is not None
            self._counters.add("generated_tokens", written, model=self._service.name)
            yield list(changed.values())
        self._counters.duration.observe(time.monotonic() - self._begin)

    def cancel(self) -> None:
        """Frees the slots of an answer that is no longer wanted; does nothing after its end."""
        if self._generation is not None and self._generation.open and not self._generation.cancelled:
            self._counters.add("cancelled", model=self._service.name)
            self._service.engine.cancel(self._generation)

    def _event(self, choices: list[Json], usage: Json | None = None) -> bytes:
        body = self._object(choices, streamed=True)
        if self._request.include_usage:
            body["usage"] = usage
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _object(self, choices: list[Json], streamed: bool = False) -> Json:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._chat else "text_completion"
        names = {"id": self._id, "object": kind, "created": self._created, "model": self._service.name}
        return names | {"choices": choices}

    def _usage(self) -> Json:
        written = sum(choice.count for choice in self._choices)
        total = self._prompt_tokens + written
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": written, "total_tokens": total}

    def _choice(self, choice: Choice, *, streamed: bool = False) -> Json:
        """A whole choice, or what is new in it."""
        text, tokens = choice.take()
        entry: Json = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self._request.logprobs is not None:
            entry["logprobs"] = self._chat_logprobs(tokens) if self._chat else self._completion_logprobs(tokens)
        if not self._chat:
            entry["text"] = text
        elif streamed:
            entry["delta"] = {"content": text}
        else:
            entry["message"] = {"role": "assistant", "content": text, "refusal": None}
        return entry

    def _completion_logprobs(self, tokens: Sequence[tuple[int, Emission]]) -> Json:
        name = self._service.token_text
        found = [emission.logprobs for _, emission in tokens if emission.logprobs is not None]
        return {
            "tokens": [name(emission.token) for _, emission in tokens],
            "token_logprobs": [one.chosen for one in found],
            "top_logprobs": [{name(token): value for token, value in one.top} for one in found],
            "text_offset": [offset for offset, _ in tokens],
        }

    def _chat_logprobs(self, tokens: Sequence[tuple[int, Emission]]) -> Json:
        def entry(token: int, value: float) -> Json:
            text = self._service.token_text(token)
            whole = not text.startswith(PARTIAL_TOKEN)
            return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}

        content = []
        for offset, emission in tokens:
            if emission.logprobs is not None and emission.token is not None:
                top = [entry(token, value) for token, value in emission.logprobs.top]
                more = {"top_logprobs": top, "text_offset": offset}  # the offset is not OpenAI's: for the playground
                content.append(entry(emission.token, emission.logprobs.chosen) | more)
        return {"content": content, "refusal": None}


async def until_gone(work: "asyncio.Task[bytes]", gone: "asyncio.Task[None]") -> bytes | None:
    """The result of the work; None if the client disconnects first."""
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        work.cancel()
        gone.cancel()
