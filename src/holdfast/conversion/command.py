"""The verb `convert`: its options, and what it prints."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result
from holdfast.tokenizers.options import TokenizerOptions


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(TokenizerOptions):
    """Convert a checkpoint between Megatron, Hugging Face and Holdfast, exactly and without running code from it.

    The format of the source is recognised: a release zip, a .pt file, a Megatron run or iteration folder (torch format of any
    version, or torch_dist), a Hugging Face folder, a Holdfast run or checkpoint.

    Examples:

      holdfast convert runs/first first-hf
      holdfast convert first-hf first-megatron --to megatron --tensor-model-parallel-size 2
      holdfast convert megatron_lm_345m_v0.0.zip gpt2-345m \\
          --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --verify
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "to": "format",
        "tensor_model_parallel_size": "output",
        "vocab_file": "source",
        "true_vocab_size": "source",
        "verify": "checks and reporting",
    }

    source: Path = field(metadata=positional("SRC"))
    """File or folder to convert."""
    destination: Path = field(metadata=positional("DST"))
    """Folder to write; it must not exist yet, or be empty."""
    to: Literal["hf", "megatron", "holdfast"] = "hf"
    """Format to write."""
    tensor_model_parallel_size: int = 1
    """To megatron: ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """To megatron: pipeline stages."""
    megatron_names: Literal["mcore", "legacy"] = "mcore"
    """To megatron: names of Megatron-core, or those of Megatron-LM's own models before it."""
    make_vocab_size_divisible_by: int | None = None
    """To megatron and holdfast: pad the vocabulary to a multiple of this × tensor ranks."""
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    """Element type to write. Unset: that of the source (float32 for holdfast)."""
    max_shard_size: str = "5GB"
    """To hf: largest weight file."""
    bin: bool = False
    """To hf: pytorch_model.bin instead of safetensors, for old readers."""
    keep_padding: bool = False
    """To hf: keep the rows of Megatron's vocabulary padding in a separate file, for an exact conversion back."""
    true_vocab_size: int | None = None
    """Number of tokens without padding, where no tokenizer gives it, or a run has more rows than its tokenizer."""
    num_attention_heads: int | None = None
    """Heads, for Megatron files without args."""
    ignore_args: tuple[str, ...] = ()
    """Names of args in a Megatron checkpoint that Holdfast does not know and that do not change what the model computes."""
    checkpoint_version: float | None = None
    """Megatron source: the version whose row order applies, where the file has none or a wrong one. To megatron from
    another format: 2.0 or 3.0."""
    verify: bool = False
    """Read both sides again, compare checksums per tensor and fp64 logits."""
    json: bool = False
    """Print the result as JSON."""


def convert(options: ConvertOptions) -> None:
    from holdfast.conversion.converting import run_conversion
    from holdfast.system.progress import log

    report = run_conversion(options)
    log(f"{options.source}: {report.source}")
    for note in report.notes:
        log(f"note: {note}")
    if report.verification is not None:
        log(f"verified: {report.verification['summary']}")
    path = str(report.destination)
    print_result(vars(report) | {"destination": path}, path, options.json, indent=False)
