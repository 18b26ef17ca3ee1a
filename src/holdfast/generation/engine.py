"""Generation, from prompts as text to completions as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.generation.decoding import Sequences
from holdfast.generation.loading import LoadedModel, load_model
from holdfast.generation.sampling import Sampling, draw
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log

# Sequences in one batch.
ROWS = 64


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation; `text` is both."""

    prompt: str
    completion: str
    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        return self.prompt + self.completion


def generate(
    model: str | Path | LoadedModel,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    compile: bool = False,
    tokenizer: Mapping[str, str | None] | None = None,
) -> list[Completion]:
    """Completions of each prompt, in order, from a Hugging Face folder, a run, a checkpoint, or a model already loaded.

    `compile` compiles the layers first, which pays off for long or many texts. `tokenizer` has the keys vocab_file, merge_file,
    tokenizer_model and tokenizer_type, for a model that names no tokenizer.
    """
    sampling = Sampling(temperature, top_k, top_p)
    for name, value in {"max_new_tokens": max_new_tokens, "num_return_sequences": num_return_sequences}.items():
        if value < 1:
            raise UsageError(f"{name} {value}: give 1 or more")
    loaded = model if isinstance(model, LoadedModel) else load_model(model, tokenizer=tokenizer)
    if compile:
        loaded.compile()
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    read = [_tokens(loaded, text) for text in texts]
    written: list[list[int]] = []
    portion = max(1, ROWS // num_return_sequences)
    for first in range(0, len(read), portion):
        part = read[first : first + portion]
        draws = [
            draw(seed, prompt, sequence, max_new_tokens)
            for prompt in range(first, first + len(part))
            for sequence in range(num_return_sequences)
        ]
        written += _complete(loaded, part, torch.stack(draws), sampling, num_return_sequences)
    sources = [text for text in texts for _ in range(num_return_sequences)]
    return [
        Completion(prompt, loaded.tokenizer.decode(tokens), tuple(tokens))
        for prompt, tokens in zip(sources, written, strict=True)
    ]


def _tokens(loaded: LoadedModel, prompt: str) -> list[int]:
    tokens = loaded.tokenizer.encode(prompt) or [loaded.tokenizer.eod or 0]
    if len(tokens) >= loaded.max_positions:
        raise HoldfastError(
            f"the prompt has {len(tokens)} tokens, but the model's positions end at {loaded.max_positions}; shorten it"
        )
    return tokens


def _complete(
    loaded: LoadedModel, prompts: list[list[int]], draws_BL: torch.Tensor, sampling: Sampling, copies: int
) -> list[list[int]]:
    limit = draws_BL.shape[1]
    remaining = [loaded.max_positions - len(prompt) for prompt in prompts]
    if min(remaining) < limit:
        log(f"the model's positions allow {min(remaining)} more tokens after the longest prompt, not {limit}")
    wanted = [min(limit, left) for left in remaining for _ in range(copies)]
    sequences = Sequences(
        loaded.model,
        prompts,
        draws_BL[:, : max(wanted)],
        sampling,
        copies=copies,
        max_positions=loaded.max_positions,
    )
    return sequences.write(wanted, loaded.tokenizer.eod)
