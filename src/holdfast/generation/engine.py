"""Generation: read the prompt once, then one token at a time through the cache, until the end-of-document token or the limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.errors import HoldfastError
from holdfast.generation.cache import build_caches
from holdfast.generation.loading import Loaded, load_model
from holdfast.generation.sampling import Sampling, next_token
from holdfast.models.gpt import GPT
from holdfast.progress import say


@dataclass(frozen=True)
class Completion:
    """What the model made of a prompt. `text` is prompt and completion together."""

    prompt: str
    completion: str
    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        return self.prompt + self.completion


def generate(
    model: str | Path | Loaded,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    num_return_sequences: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
) -> list[Completion]:
    """Completions of each prompt, in order, from a Hugging Face folder, a run, a checkpoint, or a model already loaded."""
    loaded = model if isinstance(model, Loaded) else load_model(model)
    sampling = Sampling(temperature, top_k, top_p)
    found = []
    for number, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        generator = torch.Generator(loaded.device).manual_seed(seed + number)
        for tokens in _complete(loaded, prompt, max_new_tokens, num_return_sequences, sampling, generator):
            found.append(Completion(prompt, loaded.tokenizer.decode(tokens), tuple(tokens)))
    return found


def _complete(
    loaded: Loaded, prompt: str, limit: int, sequences: int, sampling: Sampling, generator: torch.Generator
) -> list[list[int]]:
    read = loaded.tokenizer.encode(prompt) or [loaded.tokenizer.eod or 0]
    room = loaded.max_positions - len(read)
    if room < 1:
        raise HoldfastError(
            f"the prompt has {len(read)} tokens, but the model's positions end at {loaded.max_positions}; shorten it"
        )
    if room < limit:
        say(f"the model's positions allow {room} more tokens after this prompt, not {limit}")
    written: list[list[int]] = [[] for _ in range(sequences)]
    open_rows = set(range(sequences))
    for tokens in _stream(loaded.model, read, min(limit, room), sequences, sampling, generator):
        for row in list(open_rows):
            if tokens[row] == loaded.tokenizer.eod:
                open_rows.discard(row)
            else:
                written[row].append(tokens[row])
        if not open_rows:
            break
    return written


@torch.inference_mode()
def _stream(
    model: GPT, read: list[int], limit: int, sequences: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[list[int]]:
    """The next token of every sequence, again and again."""
    device = generator.device
    caches = build_caches(model.config, len(read) + limit, model.dtype, device)
    hidden = model.hidden(torch.tensor([read], device=device), caches=caches)
    for cache in caches:
        cache.repeat(sequences)
    hidden = hidden[:, -1].expand(sequences, -1)
    for count in range(limit):
        tokens = next_token(model.logits(hidden), sampling, generator)
        yield tokens.tolist()
        if count + 1 < limit:
            position = torch.tensor([[len(read) + count]], device=device)
            everything = torch.ones(1, 1, 1, len(read) + count + 1, dtype=torch.bool, device=device)
            hidden = model.hidden(tokens[:, None], position, caches=caches, mask=everything)[:, -1]
