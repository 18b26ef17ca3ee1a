"""The models of a server: loaded, each with the threads that own what is not thread-safe.

A tokenizer is used by three threads: the engine's decodes tokens, one encodes prompts, the event loop decodes single tokens. Each
has its own copy.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from holdfast.generation.loading import LoadedModel, load_model, read_source
from holdfast.generation.masked import LoadedBERT, embed, load_bert
from holdfast.generation.slots import SlotEngine
from holdfast.serve.api_errors import ApiError, invalid
from holdfast.serve.chat_template import ChatTemplate, find_template
from holdfast.serve.engine_thread import EngineThread
from holdfast.serve.text_requests import Prompt
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers import Tokenizer

Result = TypeVar("Result")
# Slots by default. A slot's cache takes memory for all positions of the model.
SLOTS = {"cuda": 64, "cpu": 8}
# Name of a token that is only a part of a character; its id follows.
PARTIAL_TOKEN = "token_id:"


class OwnThread:
    """One thread for calls that must not run at the same time; at most `limit` of them wait or run."""

    def __init__(self, name: str, limit: int) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._limit, self.load = limit, 0

    async def call(self, function: Callable[[], Result]) -> Result:
        if self.load >= self._limit:
            raise ApiError(429, "the queue is full; retry later", code="queue_full")
        self.load += 1
        future = self._executor.submit(function)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self.load -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class GPTService:
    """A model that generates text."""

    capabilities: tuple[str, ...]

    def __init__(self, name: str, loaded: LoadedModel, slots: int, max_queue: int, template: str | None) -> None:
        self.name, self.max_positions = name, loaded.max_positions
        self.engine = EngineThread(partial(SlotEngine, loaded, slots), max_queue)
        self._vocabulary = loaded.model.vocab_size
        self._encoding = OwnThread("encode", slots + max_queue)
        recipe = loaded.tokenizer.recipe
        self._eod = loaded.tokenizer.eod or 0
        self._encoder = loaded.tokenizer.fresh_copy()
        # A chat template writes the special tokens itself.
        self._chat_encoder = Tokenizer(replace(recipe, special_tokens=False))
        decoder = loaded.tokenizer.fresh_copy()
        self.decode = decoder.decode
        self.token_text = lru_cache(1 << 16)(lambda token: _token_text(decoder, token))
        self.chat: ChatTemplate | None = None
        if template is not None:
            special = {"bos_token": recipe.bos, "eos_token": recipe.eod, "pad_token": recipe.pad}
            names = {key: "" if token is None else decoder.decode([token]) for key, token in special.items()}
            self.chat = ChatTemplate(template, names)
        self.capabilities = ("completions", "chat") if self.chat else ("completions",)

    @property
    def failure(self) -> str | None:
        return self.engine.failure

    @property
    def load(self) -> tuple[int, int]:
        """Sequences in slots, and waiting for one."""
        running = min(self.engine.load, self.engine.slots)
        return running, self.engine.load - running

    def start(self) -> None:
        self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        self._encoding.close()
        if self.chat is not None:
            await self.chat.close()

    async def encode(
        self, prompt: Prompt, max_tokens: int | None, *, chat: bool = False
    ) -> tuple[tuple[int, ...], int]:
        """Token ids of a prompt, and how many may follow."""
        if isinstance(prompt, str):
            encoder = self._chat_encoder if chat else self._encoder
            found = await self._encoding.call(lambda: encoder.encode(prompt))
        else:
            found = prompt
            if not 0 <= min(found) <= max(found) < self._vocabulary:
                raise invalid(f"prompt has token ids outside of 0 to {self._vocabulary - 1}", "prompt")
        tokens = tuple(found) or (self._eod,)
        left = self.max_positions - len(tokens)
        if left < 1:
            raise invalid(
                f"this model's maximum context length is {self.max_positions:,} tokens; the prompt has {len(tokens):,}",
                "messages" if chat else "prompt",
                "context_length_exceeded",
            )
        return tokens, min(max_tokens or left, left)


class BERTService:
    """A model that computes embeddings of texts."""

    capabilities = ("embeddings",)
    failure = None

    def __init__(self, name: str, loaded: LoadedBERT, max_queue: int) -> None:
        self.name, self.max_positions = name, loaded.max_positions
        self._loaded, self._thread = loaded, OwnThread("bert", 1 + max_queue)

    @property
    def load(self) -> tuple[int, int]:
        running = min(self._thread.load, 1)
        return running, self._thread.load - running

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        self._thread.close()

    async def embed(self, inputs: Sequence[Prompt]) -> tuple[list[list[float]], int]:
        """A vector for each input, and the number of their tokens."""
        return await self._thread.call(lambda: self._embed(inputs))

    def _embed(self, inputs: Sequence[Prompt]) -> tuple[list[list[float]], int]:
        try:
            tokens = [
                self._loaded.encode(text) if isinstance(text, str) else self._loaded.check(text) for text in inputs
            ]
        except HoldfastError as error:
            raise invalid(str(error), "input") from None
        return embed(self._loaded, tokens).tolist(), sum(map(len, tokens))


Service = GPTService | BERTService


def load_service(
    path: str, name: str, *, slots: int | None, max_queue: int, tokenizer: Mapping[str, str | None]
) -> Service:
    """Loads the model at a path and prepares its threads."""
    source = read_source(path)
    if source.architecture.model_type == "bert":
        return BERTService(name, load_bert(path, tokenizer=tokenizer, source=source), max_queue)
    loaded = load_model(path, tokenizer=tokenizer, source=source)
    slots = slots or SLOTS["cuda" if loaded.device.type == "cuda" else "cpu"]
    template = find_template(_template_folders(Path(path), tokenizer))
    return GPTService(name, loaded, slots, max_queue, template)


def _template_folders(path: Path, tokenizer: Mapping[str, str | None]) -> Iterable[Path]:
    """Where a chat template may be: beside the tokenizer that the user names, in the model's folder, in a run's."""
    named = tokenizer.get("tokenizer_model")
    if named is not None:
        yield Path(named) if Path(named).is_dir() else Path(named).parent
    yield from (path, path / "tokenizer", path.parent.parent / "tokenizer")


def service_names(paths: Sequence[str]) -> list[str]:
    """A name for each model: that of its folder or file, numbered if it occurs again."""
    names: list[str] = []
    for path in paths:
        name = plain = Path(path).resolve().name
        number = 1
        while name in names:
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    if len(paths) > 2:
        raise UsageError("serve takes one or two models")
    return names


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a single token, or the name of one that is only a part of a character."""
    text = tokenizer.decode([token])
    return f"{PARTIAL_TOKEN}{token}" if "\N{REPLACEMENT CHARACTER}" in text else text
