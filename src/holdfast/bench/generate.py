"""`bench generate`: greedy texts from a model with random weights, beside Hugging Face's `generate` and vLLM.

All contenders generate the same number of tokens from the same prompts. A turn is a whole call: prefill, every token, and
the copy of the tokens to the host.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from holdfast.bench.harness import Row, Tables, installed, refuse_unknown, run_rounds, show, timed
from holdfast.config import Config
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log

if TYPE_CHECKING:
    from holdfast.generation.model_step import WeightType

PEERS = ("hf", "hf-static", "vllm")
MODULES = {"hf": "transformers", "hf-static": "transformers", "vllm": "vllm"}
Generate = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class GenerateBench:
    """Measure the tokens per second of generation, one batch at a time.

    Examples:

      holdfast bench generate
      holdfast bench generate --batch-sizes 1 --new-tokens 64 --against hf
      holdfast bench generate --config configs/llama_1b.toml --weights int8 fp8
    """

    config: Path | None = None
    """Configuration whose model is measured. Unset: GPT-2 345M on CUDA, a tiny GPT on the CPU."""
    against: tuple[str, ...] = PEERS
    """Peers in the same run: hf (dynamic cache), hf-static (static cache, compiled; CUDA only), vllm (CUDA only)."""
    batch_sizes: tuple[int, ...] = ()
    """Sequences written at once. Unset: 1, 8 and, on CUDA, 64."""
    prompt_tokens: int = 64
    """Length of each prompt, in tokens."""
    new_tokens: int = 256
    """Tokens written after it."""
    rounds: int = 5
    """How often each contender is measured."""
    weights: tuple[Literal["int8", "fp8"], ...] = ()
    """On CUDA also measure Holdfast with 8-bit weights of these types."""
    compile: bool = False
    """On CUDA also measure Holdfast with compiled layers, for a model that the fused kernels do not compute."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: GenerateBench) -> None:
    show("generate", run(options), options.json)


def run(options: GenerateBench) -> Tables:
    refuse_unknown(options.against, PEERS)
    for name in ("batch_sizes", "prompt_tokens", "new_tokens", "rounds"):
        value = getattr(options, name)
        if min(value if isinstance(value, tuple) else (value,), default=1) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: give 1 or more")
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompt, new = options.prompt_tokens, options.new_tokens
    config = _prepare(options.config, device.type == "cuda", prompt + new)
    rows = []
    for batch in options.batch_sizes or ((1, 8, 64) if device.type == "cuda" else (1, 8)):
        rows += _measure(_generators(config, device, options, batch), batch, batch * new, options.rounds)
    if device.type == "cuda":
        floor = _bytes_per_step(config) / _bytes_per_second(device) * 1e3
        rows = [{**row, "of memory speed": f"{floor / row['ms per step']:.0%}"} for row in rows]
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
    found = {"holdfast": _holdfast(config, device, prompts, new)}
    for weights in options.weights if cuda else ():
        found[f"holdfast, {weights}"] = _holdfast(config, device, prompts, new, weights=weights)
    if options.compile and cuda:
        found["holdfast, compiled layers"] = _holdfast(config, device, prompts, new, compiled=True)
    for name in installed({name: MODULES[name] for name in options.against if cuda or name == "hf"}):
        if name == "vllm":
            found[name] = _vllm(config, prompts, new)
            continue
        with device:
            model = hugging_face_model(config).to(_dtype(device)).eval()
        cache = {"cache_implementation": "static"} if name == "hf-static" else {}
        found[name] = _hugging_face(model, prompts.to(device), new, cache)
    return found


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


class NoText:
    """A tokenizer for a model with random weights: no end of a document, no text."""

    eod, byte_tokens = None, frozenset[int]()

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        return ""


def _holdfast(
    config: Config, device: Any, prompts: Any, new: int, *, compiled: bool = False, weights: "WeightType | None" = None
) -> Generate:
    import torch

    from holdfast.generation.engine import stream
    from holdfast.generation.loading import LoadedModel, arrange_for_vectors
    from holdfast.generation.requests import GenerationRequest
    from holdfast.generation.sampling import GREEDY
    from holdfast.models.gpt import GPT
    from holdfast.parallel.layout import padded_vocab_size

    vocabulary, positions = config.model.vocab_size, config.model.max_position_embeddings
    assert vocabulary is not None and positions is not None
    padded, dtype = padded_vocab_size(vocabulary, config.model, 1), _dtype(device)
    with device:
        torch.manual_seed(1)
        model = GPT(config.model, vocab_size=vocabulary, padded_vocab_size=padded, max_positions=positions, dtype=dtype)
    loaded = LoadedModel(arrange_for_vectors(model.to(dtype).eval()), cast(Any, NoText()), positions, weights)
    if compiled:
        loaded.compile()
    requests = [GenerationRequest(tuple(row), new, GREEDY) for row in prompts.tolist()]

    def generate() -> None:
        written = [number for number, emission in stream(loaded, requests) if emission.token is not None]
        assert len(written) == new * len(requests)

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


def _vllm(config: Config, prompts: Any, new: int) -> Generate:
    """vLLM with weights of its own making; the weights' values do not change its speed."""
    import tempfile

    import torch
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    from holdfast.bench.contenders import hugging_face_model

    with tempfile.TemporaryDirectory() as folder:
        with torch.device("meta"):
            model = hugging_face_model(config)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        share = {"gpu_memory_utilization": 0.3, "max_model_len": prompts.shape[1] + new}
        engine = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **share)
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": row} for row in prompts.tolist()]

    def generate() -> None:
        written = engine.generate(requests, sampling, use_tqdm=False)
        assert all(len(found.outputs[0].token_ids) == new for found in written)

    return generate


def _bytes_per_step(config: Config) -> int:
    """Bytes of the bf16 parameters that a step reads: all but the embedding, of which it reads a row per sequence."""
    import torch

    from holdfast.models.gpt import GPT
    from holdfast.parallel.layout import padded_vocab_size

    assert config.model.vocab_size is not None and config.model.max_position_embeddings is not None
    padded = padded_vocab_size(config.model.vocab_size, config.model, 1)
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=padded, padded_vocab_size=padded, max_positions=1)
    read = [*model.decoder.parameters(), model.output_matrix()]
    return 2 * sum(parameter.numel() for parameter in read)


def _bytes_per_second(device: Any) -> float:
    """Memory speed of the device: reads and writes of the best of five large copies."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    return 2 * source.numel() / min(timed(copy) for _ in range(5))


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
