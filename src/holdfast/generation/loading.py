"""Loads a model to generate with: from a run, a checkpoint, a Hugging Face folder, a Megatron checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.config import read_config
from holdfast.conversion.holdfast_checkpoint import model_of_state
from holdfast.conversion.huggingface.tokenizer_files import choose_tokenizer
from holdfast.conversion.model import Model, check_sources, valid_ids
from holdfast.conversion.sources import read_model
from holdfast.conversion.tensors import Tensor
from holdfast.generation.model_step import WeightType, is_compiled
from holdfast.models.gpt import GPT
from holdfast.snapshot.memory.held_weights import newest_weights
from holdfast.system.cpu_features import avoid_amx_traps
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log
from holdfast.tokenizers import Tokenizer
from holdfast.tokenizers.folder import describe, recipe_of
from holdfast.tokenizers.recipe import adds_beyond

Module = TypeVar("Module", bound=torch.nn.Module)
# Rows that pad a vocabulary at most: Megatron rounds up to 128 rows on each of its tensor-parallel ranks.
MOST_PADDING = 128 * 64


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the tokenizer that belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    max_positions: int
    weights: WeightType | None = None
    """8-bit type that the matrices have while tokens are written; unset: that of the model."""
    more_ends: frozenset[int] = frozenset()
    """Tokens that end a text beside the tokenizer's own: chat models also end their turns with others."""
    spare: list[Any] = field(default_factory=list, compare=False, repr=False)
    """An idle SlotEngine, with its cache and recorded graphs."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        own = self.tokenizer.eod
        return self.more_ends if own is None else self.more_ends | {own}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt; an empty one starts from the end-of-document token."""
        return self.tokenizer.encode(text) or [self.tokenizer.eod or 0]

    def compile(self) -> None:
        """Compiles the layers; they share one compilation, made when the first token is written."""
        if is_compiled(self.model):
            return
        self.spare.clear()
        for layer in self.model.decoder.layers.values():
            layer.compile(dynamic=False)


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    tokenizer: Mapping[str, str | None] | None = None,
    source: Model | None = None,
    weights: WeightType | None = None,
) -> LoadedModel:
    """Loads a model: on CUDA in bf16 where there is a GPU, otherwise on the CPU in fp32.

    `tokenizer`: vocab_file, merge_file, tokenizer_model and tokenizer_type, for a model that names none. `source`: what
    `read_source` returned for the path, if it was called before. `weights`: write tokens with 8-bit copies of the matrices.
    """
    source = source or read_source(path)
    if source.architecture.model_type != "gpt":
        raise HoldfastError(
            f"{path} holds a BERT model, which does not generate text; --fill-mask predicts its masked tokens"
        )
    chosen = belonging_tokenizer(source, Path(path), tokenizer or {})
    device, dtype = choose_device(device, dtype)
    model = build_empty(GPT, source, chosen, device, dtype)
    positions = source.architecture.max_position_embeddings
    return LoadedModel(fill(model, source, dtype), chosen, positions, weights, _stated_ends(source))


def _stated_ends(source: Model) -> frozenset[int]:
    """The end tokens that config.json and generation_config.json state: one id or several."""
    size = source.architecture.padded_vocab_size
    stated = (source.special_ids, valid_ids(source.generation, ["eos_token_id"], size))
    found = [ids["eos_token_id"] for ids in stated if "eos_token_id" in ids]
    return frozenset(end for ids in found for end in (ids if isinstance(ids, list) else [ids]))


def build_empty(
    kind: Callable[..., Module], source: Model, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype
) -> Module:
    """The module that a source describes, with memory for its weights but no values."""
    arch = source.architecture
    with device, NoInitialization():
        return kind(
            arch.model_config(),
            vocab_size=min(arch.vocab_size or arch.padded_vocab_size, tokenizer.vocab_size),
            padded_vocab_size=arch.padded_vocab_size,
            max_positions=arch.max_position_embeddings,
            dtype=dtype,
        )


class NoInitialization(TorchFunctionMode):
    """Skips the random initial weights of modules, which are overwritten. (The meta device would skip them too, but it imports
    torch's compiler, which takes as long as torch itself.)"""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def read_source(path: str | Path) -> Model:
    """The model at a path, its checksums compared; of a run the newest state, which may be in memory only."""
    source = _held_in_memory(Path(path)) or read_model(Path(path))
    check_sources(source)
    return source


def _held_in_memory(run: Path) -> Model | None:
    """The model in the newest memory snapshot of a run, if it is newer than the run's checkpoints."""
    if not (run / "config.toml").is_file():
        return None
    on_disk = max((step for step, _ in checkpoints_in(run)), default=-1)
    weights = newest_weights(run, read_config(run / "config.toml").snapshot.snapshot_dir, newer_than=on_disk)
    if weights is None:
        return None
    log(f"reading step {weights.step:,} of {run} from its memory snapshot")
    return model_of_state(run, weights, f"Holdfast snapshot of step {weights.step}, held by {weights.world} ranks")


def choose_device(
    device: torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[torch.device, torch.dtype]:
    """CUDA and bf16 where there is a GPU, otherwise the CPU and fp32, unless the caller decides."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        avoid_amx_traps()
    return device, dtype


def fill(model: Module, source: Model, dtype: torch.dtype) -> Module:
    """The model with the weights of the source."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_read(source.tensors[name]))
        # One value that is no finite number makes the sum one.
        sums = [parameter.sum(dtype=torch.float32) for parameter in model.parameters()]
    for (name, _), finite in zip(model.named_parameters(), torch.stack(sums).isfinite().tolist(), strict=True):
        if not finite:
            raise HoldfastError(
                f"{source.origin}: {name} holds values that are not finite numbers: the training has diverged; use an earlier "
                "checkpoint"
            )
    return arrange_for_vectors(model.to(dtype).eval())


def arrange_for_vectors(model: Module) -> Module:
    """On the CPU stores matrices with more outputs than inputs by columns; their shapes and values stay the same.

    A product with one token's vector then runs 1.4 to 2.9 times as fast (256 to 768 inputs, 768 to 50,257 outputs), and a product
    with many tokens takes the same time.
    """
    for name, module in model.named_modules():
        # tied word embeddings are the output matrix too; positions are only looked up
        multiplied = isinstance(module, nn.Linear | nn.Embedding) and not name.endswith("position_embeddings")
        if multiplied and module.weight.device.type == "cpu" and module.weight.shape[0] > module.weight.shape[1]:
            module.weight.data = module.weight.data.T.contiguous().T
    return model


def _read(tensor: Tensor) -> torch.Tensor:
    bits = tensor.cast("F32").read(0, tensor.matrix[0])
    return torch.from_numpy(bits.view("<f4").reshape(tensor.shape).copy())


def belonging_tokenizer(source: Model, path: Path, given: Mapping[str, str | None]) -> Tokenizer:
    """The tokenizer that the user gives or the model names, if it belongs to the model."""
    names = choose_tokenizer(source.tokenizer, source.architecture.model_type, **given)
    if not names:
        raise HoldfastError(
            f"{path} names no tokenizer: give --vocab-file and --merge-file, or --tokenizer-model (and --tokenizer-type); "
            "vocabulary files with added tokens need a tokenizer.json"
        )
    tokenizer = Tokenizer(recipe_of(names))
    rows = source.architecture.vocab_size or source.architecture.padded_vocab_size
    if tokenizer.vocab_size > rows and not adds_beyond(tokenizer.recipe, rows):
        raise HoldfastError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model in {path} only {rows:,}: it is not the "
            "tokenizer of this model"
        )
    if any(given.values()) and rows - tokenizer.vocab_size > max(MOST_PADDING, rows // 10):
        raise HoldfastError(
            f"the tokenizer has only {tokenizer.vocab_size:,} tokens, but the model in {path} {rows:,}: it is not the "
            "tokenizer of this model"
        )
    own = source.tokenizer.get("digest", tokenizer.recipe.digest)
    if tokenizer.recipe.digest != own:
        raise HoldfastError(
            f"{describe(tokenizer.recipe)} is not the tokenizer that {path} was trained with (digest {own[:12]}); "
            "leave out the flags that name it"
        )
    return tokenizer
