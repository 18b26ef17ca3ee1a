"""`bench generate`: greedy texts from a model with random weights, beside Hugging Face's `generate`.

All contenders generate the same number of tokens from the same prompts. A turn is a whole call: prefill, every token, and
the copy of the tokens to the host.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.bench.harness import Row, Tables, installed, refuse_unknown, run_rounds, show, timed
from holdfast.config import Config
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

PEERS = ("hf", "hf-static")
Generate = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class GenerateBench:
    """Measure the tokens per second of generation, one batch at a time.

    Examples:

      holdfast bench generate
      holdfast bench generate --batch-sizes 1 --new-tokens 64 --against hf
    """

    config: Path | None = None
    """Configuration whose model is measured. Unset: GPT-2 345M on CUDA, a tiny GPT on the CPU."""
    against: tuple[str, ...] = PEERS
    """Peers in the same run: hf (dynamic cache), hf-static (static cache, compiled; CUDA only)."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Sequences written at once."""
    prompt_tokens: int = 64
    """Length of each prompt, in tokens."""
    new_tokens: int = 256
    """Tokens written after it."""
    rounds: int = 5
    """How often each contender is measured."""
    compile: bool = True
    """On CUDA also measure Holdfast with compiled layers."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: GenerateBench) -> None:
    show("generate", run(options), options.json)


def run(options: GenerateBench) -> Tables:
    import torch

    refuse_unknown(options.against, PEERS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompt, new = options.prompt_tokens, options.new_tokens
    config = _prepare(options.config, device.type == "cuda", prompt + new)
    rows = []
    for batch in options.batch_sizes:
        rows += _measure(_generators(config, device, options, batch), batch, batch * new, options.rounds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    shape = f"{config.model.num_layers} layers × {config.model.hidden_size}"
    return {f"greedy, {shape}, prompt {prompt}, {new} new tokens, {name}, torch {torch.__version__}": rows}


def _prepare(path: Path | None, cuda: bool, length: int) -> Config:
    from holdfast.bench.contenders import chosen_config

    config = chosen_config(path, cuda, 1024)
    if config.model.model_type != "gpt":
        raise HoldfastError("BERT models do not generate text; give a GPT configuration")
    positions = max(config.model.max_position_embeddings or config.data.seq_length, length)
    vocabulary = config.model.vocab_size or 50257
    return replace(config, model=replace(config.model, vocab_size=vocabulary, max_position_embeddings=positions))


def _generators(config: Config, device: Any, options: GenerateBench, batch: int) -> dict[str, Generate]:
    import torch

    from holdfast.bench.contenders import hugging_face_model

    assert config.model.vocab_size is not None
    cuda, new = device.type == "cuda", options.new_tokens
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, config.model.vocab_size, (batch, options.prompt_tokens), generator=random)
    found = {"holdfast": _holdfast(config, device, prompts, new, compiled=False)}
    if options.compile and cuda:
        found["holdfast, compiled layers"] = _holdfast(config, device, prompts, new, compiled=True)
    for name in installed({name: "transformers" for name in options.against if cuda or name != "hf-static"}):
        with device:
            model = hugging_face_model(config).to(_dtype(device)).eval()
        cache = {"cache_implementation": "static"} if name == "hf-static" else {}
        found[name] = _hugging_face(model, prompts.to(device), new, cache)
    return found


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _holdfast(config: Config, device: Any, prompts: Any, new: int, *, compiled: bool) -> Generate:
    import torch

    from holdfast.generation.decoding import Sequences
    from holdfast.generation.sampling import Sampling
    from holdfast.models.gpt import GPT
    from holdfast.parallel.layout import padded_vocab_size

    vocabulary, positions = config.model.vocab_size, config.model.max_position_embeddings
    assert vocabulary is not None and positions is not None
    padded, dtype = padded_vocab_size(vocabulary, config.model, 1), _dtype(device)
    with device:
        torch.manual_seed(1)
        model = GPT(config.model, vocab_size=vocabulary, padded_vocab_size=padded, max_positions=positions, dtype=dtype)
    model = model.to(dtype).eval()
    if compiled:
        for layer in model.decoder.layers.values():
            layer.compile(dynamic=False)
    rows = prompts.tolist()
    draws = torch.zeros(len(rows), new)

    def generate() -> None:
        sequences = Sequences(model, rows, draws, Sampling(temperature=0), copies=1, max_positions=positions)
        written = sequences.write([new] * len(rows), None)
        assert all(len(tokens) == new for tokens in written)

    return generate


def _hugging_face(model: Any, prompts: Any, new: int, cache: dict[str, Any]) -> Generate:
    import torch

    @torch.inference_mode()
    def generate() -> None:
        length = {"max_new_tokens": new, "min_new_tokens": new}
        greedy = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
        written = model.generate(prompts, attention_mask=torch.ones_like(prompts), **length, **greedy, **cache)
        assert written.tolist() and written.shape[1] == prompts.shape[1] + new

    return generate


def _measure(generators: dict[str, Generate], batch: int, tokens: int, rounds: int) -> list[Row]:
    first = {}
    for name, generate in generators.items():
        log(f"batch {batch}: {name}, first call")
        first[name] = timed(generate)
    turns = {name: functools.partial(timed, generate) for name, generate in generators.items()}
    seconds = run_rounds(turns, rounds)
    own = statistics.median(seconds["holdfast"])
    return [
        {
            "batch": batch,
            "contender": name,
            "tokens/s": round(tokens / statistics.median(spent), 1),
            "holdfast is": f"{statistics.median(spent) / own:.2f} ×",
            "ms per step": round(statistics.median(spent) / (tokens / batch) * 1e3, 3),
            "fastest to slowest": f"{tokens / max(spent):.1f}–{tokens / min(spent):.1f}",
            "first call s": round(first[name], 2),
        }
        for name, spent in seconds.items()
    ]
