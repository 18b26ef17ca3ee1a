"""Requests for text: the JSON of /v1/completions and /v1/chat/completions, checked, as dataclasses."""

import secrets
from dataclasses import dataclass
from typing import Any

from holdfast.generation.sampling import MAX_PENALTY, MIN_TEMPERATURE, MIN_TOP_P
from holdfast.serve.api_errors import invalid
from holdfast.serve.fields import Fields

MAX_CHOICES = 128
# Texts of one request for embeddings, as OpenAI has it.
MAX_INPUTS = 2048
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_TOKENS = 1 << 30

UNSUPPORTED = ("presence_penalty", "frequency_penalty", "logit_bias")
UNSUPPORTED_COMPLETION = (*UNSUPPORTED, "suffix")
UNSUPPORTED_CHAT = (
    *(*UNSUPPORTED, "tools", "tool_choice", "functions", "function_call", "audio", "web_search_options"),
    *("response_format", "moderation"),
)

Prompt = str | list[int]


@dataclass(frozen=True)
class TextRequest:
    """What both endpoints have in common."""

    model: str | None
    max_tokens: int | None
    """None: as many as the model's positions allow."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    choices: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    """How many alternatives to report beside each token; None reports nothing."""
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    echo: bool = False


def read_completion(body: bytes) -> TextRequest:
    fields = Fields(body)
    prompts = read_prompts(fields.take("prompt"), "prompt")
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    if echo and logprobs is not None:
        raise invalid("echo with logprobs is not supported by this server", "echo", "unsupported_parameter")
    best_of = fields.integer("best_of", None, 1, MAX_CHOICES)
    fields.unsupported(UNSUPPORTED_COMPLETION)
    found = _shared(fields, fields.integer("max_tokens", 16, 1, MAX_TOKENS), logprobs, prompts=prompts, echo=echo)
    if best_of not in (None, found.choices):
        raise invalid("best_of is not supported by this server, unless it equals n", "best_of", "unsupported_parameter")
    if len(prompts) * found.choices > MAX_CHOICES:
        raise invalid(f"{len(prompts)} prompts times n = {found.choices}: at most {MAX_CHOICES} texts per request", "n")
    return found


def read_chat(body: bytes) -> TextRequest:
    fields = Fields(body)
    messages = _messages(fields.take("messages"))
    wanted = fields.boolean("logprobs")
    alternatives = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if alternatives is not None and not wanted:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    newer, older = (fields.integer(key, None, 1, MAX_TOKENS) for key in ("max_completion_tokens", "max_tokens"))
    fields.unsupported(UNSUPPORTED_CHAT)
    if fields.take("modalities") not in (None, ["text"]):
        raise invalid("this server generates text only", "modalities", "unsupported_parameter")
    return _shared(fields, newer or older, (alternatives or 0) if wanted else None, messages=messages)


def _shared(fields: Fields, max_tokens: int | None, logprobs: int | None, **own: Any) -> TextRequest:
    stream = fields.boolean("stream")
    seed = fields.integer("seed", None, -(1 << 63), (1 << 63) - 1)
    temperature = fields.number("temperature", 1.0, 0, 2)
    found = TextRequest(
        model=fields.text("model"),
        max_tokens=max_tokens,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=max(fields.number("top_p", 1.0, 0, 1, above=True), MIN_TOP_P),
        top_k=fields.integer("top_k", 0, 0, 1 << 20) or 0,
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 1 / MAX_PENALTY, MAX_PENALTY),
        seed=secrets.randbits(62) if seed is None else seed,
        stop=_stops(fields.take("stop")),
        choices=fields.integer("n", 1, 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=_include_usage(fields.take("stream_options"), stream),
        logprobs=logprobs,
        **own,
    )
    fields.finish()
    return found


def read_prompts(value: Any, name: str, most: int = MAX_CHOICES) -> tuple[Prompt, ...]:
    """One or more prompts: a string, a list of strings, a list of token ids, or a list of such lists; `most` of them."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if len(value) > most and not isinstance(value[0], int):
            raise invalid(f"{name} has {len(value):,} entries; give at most {most:,}", name)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_ids(value):
            return (value,)
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return tuple(value)
    raise invalid(f"{name} must be a string, a list of strings, a list of token ids, or a list of such lists", name)


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop must be a string or a list of strings, none of them empty", "stop")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise invalid(f"stop takes at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(stops)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise invalid("stream_options takes include_usage", "stream_options")
    wanted = value.get("include_usage", False)
    if not isinstance(wanted, bool):
        raise invalid("include_usage must be true or false", "stream_options.include_usage")
    return wanted


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list with at least one message", "messages")
    if len(value) > MAX_MESSAGES:
        raise invalid(f"messages has {len(value):,} entries; give at most {MAX_MESSAGES:,}", "messages")
    return tuple(_message(item, f"messages.{number}") for number, item in enumerate(value))


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise invalid(f"{where} must be an object with role and content", where)
    content = item.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise invalid(f"{where}.content takes text parts only", f"{where}.content")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise invalid(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    message = {"role": item["role"], "content": content}
    name = item.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise invalid(f"{where}.name must be a string", f"{where}.name")
        message["name"] = name
    return message
