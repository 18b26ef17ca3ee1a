"""`convert`: reads a model, plans the target completely, streams it, and publishes it by rename."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.conversion.model import Model, with_vocabulary
from holdfast.conversion.options import Options, Target
from holdfast.conversion.sources import read_model
from holdfast.conversion.stream import Plan, write_plan
from holdfast.errors import HoldfastError, UsageError
from holdfast.publish import publish_folder

if TYPE_CHECKING:
    from holdfast.conversion.tokenizer_files import TokenizerFiles

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass
class Report:
    """What was done, for people and for --json."""

    destination: Path
    source: str
    bytes: int
    tensors: int
    notes: list[str] = field(default_factory=list)
    verification: dict[str, Any] | None = None


def convert(source: Path | str, destination: Path | str, to: Target = "hf", **options: Any) -> Path:
    """Converts a checkpoint. `options` are the flags of `holdfast convert`, with underscores. Gives the new folder's path."""
    return run_conversion(Path(source), Path(destination), to, Options(**options)).destination


def run_conversion(source: Path, destination: Path, to: Target, options: Options) -> Report:
    if to not in ("hf", "megatron", "holdfast"):
        raise UsageError(f"--to {to}: choose hf, megatron or holdfast")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"--dtype {options.dtype}: choose one of {', '.join(DTYPES)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise HoldfastError(f"{destination} already exists; choose another name or remove it first")
    if source.is_dir() and destination.resolve().is_relative_to(source.resolve()) and destination != source:
        raise HoldfastError(f"{destination} lies inside the source {source}; choose a folder outside it")
    model = read_model(source, options.num_attention_heads, options.checkpoint_version)
    model, tokenizer = settle_vocabulary(model, options)
    if options.make_vocab_size_divisible_by is not None:
        arch = replace(model.architecture, vocab_multiple=options.make_vocab_size_divisible_by)
        model = replace(model, architecture=arch)
    plan = _plan(model, tokenizer, to, options)
    with publish_folder(destination) as folder:
        digests = write_plan(plan, folder, model.regions, hashed=options.verify)
        verification = None
        if options.verify:
            from holdfast.conversion.verify import verify_conversion

            verification = verify_conversion(model, folder, to, digests)
    count = sum(len(file.tensors) for file in plan.files)
    return Report(destination, model.origin, plan.nbytes, count, [*model.notes, *plan.notes], verification)


def settle_vocabulary(model: Model, options: Options) -> tuple[Model, "TokenizerFiles | None"]:
    """The true vocabulary size and the tokenizer's files, from the flags first, then from what the source names."""
    arch = model.architecture
    named = any((options.vocab_file, options.merge_file, options.tokenizer_model))
    given = (
        {key: getattr(options, key) for key in ("vocab_file", "merge_file", "tokenizer_model")}
        if named
        else model.tokenizer
    )
    lower = model.tokenizer.get("tokenizer_type") != "BertWordPieceCase"
    tokenizer = None
    files = [given[key] for key in ("vocab_file", "merge_file", "tokenizer_model") if given.get(key)]
    if files and (named or all(Path(file).exists() for file in files)):
        from holdfast.conversion.tokenizer_files import read_tokenizer

        tokenizer = read_tokenizer(
            given.get("vocab_file"),
            given.get("merge_file"),
            given.get("tokenizer_model"),
            arch.family,
            lower,
            arch.max_position_embeddings,
        )
    elif files:
        model.notes.append("the tokenizer that the source names is not there any more")
    if options.true_vocab_size is not None and options.true_vocab_size < 1:
        raise UsageError("--true-vocab-size must be positive")
    model = with_vocabulary(model, options.true_vocab_size, "--true-vocab-size")
    if tokenizer is not None:
        model = with_vocabulary(model, tokenizer.size, tokenizer.source)
    return model, tokenizer


def _plan(model: Model, tokenizer: "TokenizerFiles | None", to: Target, options: Options) -> Plan:
    dtype = DTYPES[options.dtype] if options.dtype else None
    if to == "hf":
        from holdfast.conversion.huggingface_write import plan_huggingface

        return plan_huggingface(model, tokenizer, dtype, options.max_shard_size, options.bin, options.keep_padding)
    if to == "megatron":
        from holdfast.conversion.megatron_write import plan_megatron

        from_megatron = model.facts.get("kind") == "megatron"
        version = 3.0 if from_megatron or options.checkpoint_version is None else options.checkpoint_version
        return plan_megatron(
            model,
            dtype,
            options.tensor_model_parallel_size,
            options.pipeline_model_parallel_size,
            version,
            options.megatron_names,
        )
    from holdfast.conversion.holdfast_checkpoint import plan_holdfast

    return plan_holdfast(model, dtype)
