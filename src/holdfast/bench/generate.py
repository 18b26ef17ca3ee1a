"""`bench generate`: greedy texts from a model with random weights, beside Hugging Face's `generate`.

All write the same number of tokens from the same prompts; contenders take turns, the median turn is reported. A turn is a whole
call: the prompt is read, every token is written, the texts are on the host.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.bench.command import Tables, refuse_unknown, show
from holdfast.config import Config, DataConfig, ModelConfig, read_config
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

PEERS = ("hf", "hf-static")
Write = Callable[[], Any]


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
    chosen = _prepare(options.config, device.type == "cuda", options.prompt_tokens + options.new_tokens)
    against = options.against
    if against and importlib.util.find_spec("transformers") is None:
        log("hf is left out: transformers is not installed")
        against = ()
    rows = []
    for batch in options.batch_sizes:
        writers = _writers(chosen, device, against, batch, options.prompt_tokens, options.new_tokens, options.compile)
        rows += _rounds(writers, batch, batch * options.new_tokens, options.rounds, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    shape = f"{chosen.model.num_layers} layers × {chosen.model.hidden_size}"
    title = f"greedy, {shape}, prompt {options.prompt_tokens}, {options.new_tokens} new tokens, {name}, torch {torch.__version__}"
    return {title: rows}


def _prepare(path: Path | None, cuda: bool, length: int) -> Config:
    if path is not None:
        config = read_config(path)
    elif cuda:
        model = ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16, vocab_size=50257, openai_gelu=True)
        config = Config(model=model, data=DataConfig(seq_length=1024))
    else:
        model = ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=4096, openai_gelu=True)
        config = Config(model=model, data=DataConfig(seq_length=1024))
    if config.model.model_type != "gpt":
        raise HoldfastError("BERT models do not generate text; give a GPT configuration")
    model = replace(config.model, vocab_size=config.model.vocab_size or 50257)
    positions = max(model.max_position_embeddings or config.data.seq_length, length)
    return replace(config, model=replace(model, max_position_embeddings=positions))


def _writers(
    config: Config, device: Any, against: tuple[str, ...], batch: int, prompt: int, new: int, compile: bool
) -> dict[str, Write]:
    import torch

    from holdfast.bench.contenders import hugging_face_model

    assert config.model.vocab_size is not None
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, config.model.vocab_size, (batch, prompt), generator=generator)
    found = {"holdfast": _holdfast(config, device, prompts, new, compiled=False)}
    if compile and device.type == "cuda":
        found["holdfast, compiled layers"] = _holdfast(config, device, prompts, new, compiled=True)
    for name in against:
        if name == "hf-static" and device.type != "cuda":
            continue
        with device:
            model = hugging_face_model(config).to(_dtype(device)).eval()
        options = {"cache_implementation": "static"} if name == "hf-static" else {}
        found[name] = _hugging_face(model, prompts.to(device), new, options)
    return found


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _holdfast(config: Config, device: Any, prompts: Any, new: int, *, compiled: bool) -> Write:
    import torch

    from holdfast.generation.decoding import Sequences
    from holdfast.generation.sampling import Sampling
    from holdfast.models.gpt import GPT
    from holdfast.parallel.layout import padded_vocab_size

    vocabulary, positions = config.model.vocab_size, config.model.max_position_embeddings
    assert vocabulary is not None and positions is not None
    padded = padded_vocab_size(vocabulary, config.model, 1)
    with device:
        torch.manual_seed(1)
        model = GPT(
            config.model,
            vocab_size=vocabulary,
            padded_vocab_size=padded,
            max_positions=positions,
            dtype=_dtype(device),
        )
    model = model.to(_dtype(device)).eval()
    if compiled:
        for layer in model.decoder.layers.values():
            layer.compile(dynamic=False)
    rows = prompts.tolist()
    draws = torch.zeros(len(rows), new)

    def write() -> None:
        sequences = Sequences(model, rows, draws, Sampling(temperature=0), copies=1, max_positions=positions)
        written = sequences.write([new] * len(rows), None)
        assert all(len(tokens) == new for tokens in written)

    return write


def _hugging_face(model: Any, prompts: Any, new: int, options: dict[str, Any]) -> Write:
    import torch

    @torch.inference_mode()
    def write() -> None:
        mask = torch.ones_like(prompts)
        written = model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            **options,
        )
        assert written.tolist() and written.shape[1] == prompts.shape[1] + new

    return write


def _rounds(writers: dict[str, Write], batch: int, tokens: int, rounds: int, device: Any) -> list[dict[str, Any]]:
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in writers}
    for name, write in writers.items():
        log(f"batch {batch}: {name}, first call")
        first[name] = _timed(write)
    for _ in range(rounds):
        for name, write in writers.items():
            times[name].append(_timed(write))
    own = statistics.median(times["holdfast"])
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
        for name, spent in times.items()
    ]


def _timed(write: Write) -> float:
    start = time.perf_counter()
    write()
    return time.perf_counter() - start


if __name__ == "__main__":
    from holdfast.cli import run as run_verb

    run_verb(["bench", "generate", *sys.argv[1:]])
