"""A model to generate with, from whatever holds one: a run, a checkpoint, a Hugging Face folder, a Megatron checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.conversion.holdfast_checkpoint import config_for
from holdfast.conversion.model import Model
from holdfast.conversion.sources import read_model
from holdfast.conversion.tensors import Tensor
from holdfast.errors import HoldfastError
from holdfast.models.gpt import GPT
from holdfast.system.cpu_features import avoid_amx_traps
from holdfast.tokenizers import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class Loaded:
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


def load_model(path: str | Path, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Loaded:
    """On CUDA in bf16 where there is one, otherwise on the CPU in fp32."""
    source = read_model(Path(path))
    if source.architecture.family != "gpt":
        raise HoldfastError(
            f"{path} holds a BERT model, which does not generate text; convert it with --to hf and use it there"
        )
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        avoid_amx_traps()
    arch = source.architecture
    tokenizer = _tokenizer(source, Path(path))
    with torch.device("meta"):
        model = GPT(
            config_for(arch, source).model,
            vocab_size=min(arch.true_vocab_size or arch.padded_vocab_size, tokenizer.vocab_size),
            padded_vocab_size=arch.padded_vocab_size,
            max_positions=arch.max_position_embeddings,
            dtype=dtype,
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_read(source.tensors[name]))
    return Loaded(model.to(dtype).eval(), tokenizer, arch.max_position_embeddings)


def _read(tensor: Tensor) -> torch.Tensor:
    bits = tensor.cast("F32").read(0, tensor.matrix[0])
    return torch.from_numpy(bits.view("<f4").reshape(tensor.shape).copy())


def _tokenizer(source: Model, path: Path) -> Tokenizer:
    files = source.tokenizer
    if "tokenizer_model" in files and "vocab_file" not in files:
        return build_tokenizer(
            files.get("tokenizer_type", "HuggingFaceTokenizer"), None, None, files["tokenizer_model"]
        )
    if "vocab_file" not in files:
        raise HoldfastError(
            f"{path} names no tokenizer; put vocab.json and merges.txt, or tokenizer.json, beside the model"
        )
    kind = files.get("tokenizer_type", "GPT2BPETokenizer")
    return build_tokenizer(kind, files["vocab_file"], files.get("merge_file"), files.get("tokenizer_model"))
