"""The verb `convert`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def convert(
    source: Annotated[Path, tyro.conf.Positional],
    destination: Annotated[Path, tyro.conf.Positional],
    to: Literal["hf", "megatron", "holdfast"] = "hf",
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    checkpoint_version: float | None = None,
    megatron_names: Literal["mcore", "legacy"] = "mcore",
    make_vocab_size_divisible_by: int | None = None,
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    true_vocab_size: int | None = None,
    num_attention_heads: int | None = None,
    max_shard_size: str = "5GB",
    bin: bool = False,
    keep_padding: bool = False,
    verify: bool = False,
    json: bool = False,
) -> None:
    """Converts a checkpoint between Megatron, Hugging Face and Holdfast, exactly and without running anything in it.

    The source is recognised by itself: a release zip, a .pt file, a Megatron run or iteration folder (torch format of any
    version, or torch_dist), a Hugging Face folder, a Holdfast run or checkpoint.

        holdfast convert megatron_lm_345m_v0.0.zip gpt2-345m --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
        holdfast convert runs/tiny tiny-hf
        holdfast convert gpt2-345m megatron-345m --to megatron --tensor-model-parallel-size 2

    Args:
        source: What to convert.
        destination: The folder to make; it must not exist yet.
        to: The target's form.
        tensor_model_parallel_size: To megatron: ranks that share each layer.
        pipeline_model_parallel_size: To megatron: pipeline stages.
        checkpoint_version: Megatron source: the version whose row order applies, where the file says none or a wrong one.
            To megatron from elsewhere: 2.0 or 3.0.
        megatron_names: To megatron: names of Megatron-core, or those of Megatron-LM's own models before it.
        make_vocab_size_divisible_by: To megatron and holdfast: the vocabulary is padded to a multiple of this × tensor ranks.
        dtype: Element type to write. Unset: that of the source (float32 for holdfast).
        vocab_file: vocab.json (GPT-2) or vocab.txt (BERT) of the model's tokenizer; a catalog name works too.
        merge_file: merges.txt (GPT-2).
        tokenizer_model: tokenizer.json or its folder, instead of the two above.
        true_vocab_size: Number of tokens without padding, where no tokenizer says it.
        num_attention_heads: Heads, for Megatron files without args.
        max_shard_size: To hf: largest weight file.
        bin: To hf: pytorch_model.bin instead of safetensors, for old readers.
        keep_padding: To hf: keep the rows of Megatron's vocabulary padding in a side file, for an exact way back.
        verify: Read both sides again, compare checksums per tensor and fp64 logits.
        json: Print the result as JSON.
    """
    from holdfast.conversion.converting import Options, run_conversion
    from holdfast.progress import say

    options = Options(
        tensor_model_parallel_size, pipeline_model_parallel_size, checkpoint_version, megatron_names,
        make_vocab_size_divisible_by, dtype, vocab_file, merge_file, tokenizer_model, true_vocab_size, num_attention_heads,
        max_shard_size, bin, keep_padding, verify,
    )  # fmt: skip
    report = run_conversion(source, destination, to, options)
    say(f"{source}: {report.source}")
    for note in report.notes:
        say(f"note: {note}")
    if report.verification is not None:
        say(f"verified: {report.verification['summary']}")
    if json:
        import orjson

        print(orjson.dumps(vars(report) | {"destination": str(report.destination)}).decode())
    else:
        print(report.destination)
