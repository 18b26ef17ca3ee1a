"""Loads a model to generate with: from a run, a checkpoint, a Hugging Face folder, a Megatron checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.conversion.huggingface.tokenizer_files import choose_tokenizer
from holdfast.conversion.model import Model, check_sources
from holdfast.conversion.sources import read_model
from holdfast.conversion.tensors import Tensor
from holdfast.models.gpt import GPT
from holdfast.system.cpu_features import avoid_amx_traps
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import Tokenizer
from holdfast.tokenizers.folder import describe, recipe_of


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the tokenizer that belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    max_positions: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def compile(self) -> None:
        """Compiles the layers; they share one compilation, made when the first token is written."""
        for layer in self.model.decoder.layers.values():
            layer.compile(dynamic=False)


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    tokenizer: Mapping[str, str | None] | None = None,
) -> LoadedModel:
    """Loads a model: on CUDA in bf16 where there is a GPU, otherwise on the CPU in fp32.

    `tokenizer`: vocab_file, merge_file, tokenizer_model and tokenizer_type, for a model that names none.
    """
    source = read_model(Path(path))
    check_sources(source)
    if source.architecture.model_type != "gpt":
        raise HoldfastError(
            f"{path} holds a BERT model, which does not generate text; convert it with --to hf and use it there"
        )
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        avoid_amx_traps()
    arch = source.architecture
    chosen = _tokenizer(source, Path(path), tokenizer or {})
    with torch.device("meta"):
        model = GPT(
            arch.model_config(),
            vocab_size=min(arch.vocab_size or arch.padded_vocab_size, chosen.vocab_size),
            padded_vocab_size=arch.padded_vocab_size,
            max_positions=arch.max_position_embeddings,
            dtype=dtype,
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_read(source.tensors[name]))
    return LoadedModel(model.to(dtype).eval(), chosen, arch.max_position_embeddings)


def _read(tensor: Tensor) -> torch.Tensor:
    bits = tensor.cast("F32").read(0, tensor.matrix[0])
    return torch.from_numpy(bits.view("<f4").reshape(tensor.shape).copy())


def _tokenizer(source: Model, path: Path, given: Mapping[str, str | None]) -> Tokenizer:
    """The tokenizer that the user gives or the model names, if it belongs to the model."""
    names = choose_tokenizer(source.tokenizer, source.architecture.model_type, **given)
    if not names:
        raise HoldfastError(
            f"{path} names no tokenizer: give --vocab-file and --merge-file, or --tokenizer-model (and --tokenizer-type)"
        )
    tokenizer = Tokenizer(recipe_of(names))
    rows = source.architecture.vocab_size or source.architecture.padded_vocab_size
    if tokenizer.vocab_size > rows:
        raise HoldfastError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model in {path} only {rows:,}: it is not the "
            "tokenizer of this model"
        )
    own = source.tokenizer.get("digest", tokenizer.recipe.digest)
    if tokenizer.recipe.digest != own:
        raise HoldfastError(
            f"{describe(tokenizer.recipe)} is not the tokenizer that {path} was trained with (digest {own[:12]}); "
            "leave out the flags that name it"
        )
    return tokenizer
