"""`convert`: reads a model, plans the target completely, streams it, and publishes it by rename."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.conversion.command import ConvertOptions
from holdfast.conversion.model import Model, with_vocabulary
from holdfast.conversion.sources import read_model
from holdfast.conversion.stream import WritePlan, write_plan
from holdfast.conversion.tensors import DTYPE_NAMES
from holdfast.system.atomic_files import publish_folder
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers.folder import FILE_KEYS, recipe_of
from holdfast.tokenizers.recipe import adds_beyond

if TYPE_CHECKING:
    from holdfast.conversion.huggingface.tokenizer_files import TokenizerFiles

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass
class ConversionReport:
    """The result of a conversion, as --json prints it."""

    destination: Path
    source: str
    bytes: int
    tensors: int
    notes: list[str] = field(default_factory=list)
    verification: dict[str, Any] | None = None


def convert(
    source: Path | str, destination: Path | str, to: Literal["hf", "megatron", "holdfast"] = "hf", **options: Any
) -> Path:
    """Converts a checkpoint. `options` are the flags of `holdfast convert`, with underscores. Returns the new folder's path."""
    return run_conversion(
        ConvertOptions(source=Path(source), destination=Path(destination), to=to, **options)
    ).destination


def run_conversion(options: ConvertOptions) -> ConversionReport:
    source, destination = options.source, options.destination
    if options.to not in ("hf", "megatron", "holdfast"):
        raise UsageError(f"--to {options.to}: choose hf, megatron or holdfast")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"--dtype {options.dtype}: choose one of {', '.join(DTYPES)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise HoldfastError(f"{destination} already exists; choose another name or remove it first")
    if source.is_dir() and destination.resolve().is_relative_to(source.resolve()) and destination != source:
        raise HoldfastError(f"{destination} lies inside the source {source}; choose a folder outside it")
    model = read_model(source, options.num_attention_heads, options.checkpoint_version, options.ignore_args)
    model, tokenizer = choose_vocabulary(model, options)
    if options.make_vocab_size_divisible_by is not None:
        arch = replace(model.architecture, make_vocab_size_divisible_by=options.make_vocab_size_divisible_by)
        model = replace(model, architecture=arch)
    plan = _plan(model, tokenizer, options)
    with _ended_by_sigterm(), publish_folder(destination) as folder:
        digests = write_plan(plan, folder, model.regions, model.unchecked, hashed=options.verify)
        verification = None
        if options.verify:
            from holdfast.conversion.verify import verify_conversion

            verification = verify_conversion(
                source, model, folder, plan, digests, tokenizer, options.num_attention_heads, options.checkpoint_version
            )
    count = sum(len(file.tensors) for file in plan.files)
    return ConversionReport(destination, model.origin, plan.nbytes, count, [*model.notes, *plan.notes], verification)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does, so that the temporary folder is removed; an existing handler stays."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def choose_vocabulary(model: Model, options: ConvertOptions) -> tuple[Model, "TokenizerFiles | None"]:
    """The model with its true vocabulary size, and the tokenizer: from the flags, else from what the source names."""
    from holdfast.conversion.huggingface.tokenizer_files import choose_tokenizer, read_tokenizer

    given = options.tokenizer_names()
    flags = any(given[key] for key in FILE_KEYS)
    names = choose_tokenizer(model.tokenizer, model.architecture.model_type, **given)
    tokenizer = None
    if names and (flags or all(Path(names[key]).exists() for key in FILE_KEYS if key in names)):
        tokenizer = read_tokenizer(names, model.architecture.max_position_embeddings)
        model.notes.extend(tokenizer.notes)
    elif names:
        missing = ", ".join(names[key] for key in FILE_KEYS if key in names)
        model.notes.append(f"the tokenizer that the source names is not there ({missing}): give its files with flags")
    if flags:
        # The special ids of the given tokenizer replace those of the source.
        generation = {name: value for name, value in model.generation.items() if not name.endswith("_token_id")}
        model = replace(model, special_ids={}, generation=generation, copied_files={})
    return _with_true_size(model, options.true_vocab_size, tokenizer), tokenizer


def _with_true_size(model: Model, wanted: int | None, tokenizer: "TokenizerFiles | None") -> Model:
    if wanted is not None and wanted < 1:
        raise UsageError(f"--true-vocab-size {wanted}: give 1 or more")
    # These may have more rows than their tokenizer has tokens; the user chooses which of them to keep.
    may_have_more = model.facts.get("kind") in ("holdfast", "huggingface")
    known = model.architecture.vocab_size
    model = with_vocabulary(model, wanted, "--true-vocab-size", override=may_have_more)
    if tokenizer is None:
        return model
    if may_have_more and wanted is not None and tokenizer.size <= wanted:
        return model
    if may_have_more and known is not None and adds_beyond(recipe_of(tokenizer.names), known):
        return model
    if may_have_more and wanted is None and known is not None and tokenizer.size < known:
        raise HoldfastError(
            f"{tokenizer.source} gives {tokenizer.size} tokens, but the model was made for {known}: give --true-vocab-size "
            f"{tokenizer.size} to drop the rows that have no token, or --true-vocab-size {known} to keep them"
        )
    return with_vocabulary(model, tokenizer.size, tokenizer.source)


def _plan(model: Model, tokenizer: "TokenizerFiles | None", options: ConvertOptions) -> WritePlan:
    dtype = DTYPES[options.dtype] if options.dtype else None
    if options.to == "hf":
        from holdfast.conversion.huggingface.write import plan_huggingface

        return plan_huggingface(model, tokenizer, dtype, options.max_shard_size, options.bin, options.keep_padding)
    if options.to == "megatron":
        from holdfast.conversion.megatron.write import plan_megatron

        # --checkpoint-version is about the source where that is Megatron's.
        from_megatron = model.facts.get("kind") == "megatron"
        version = 3.0 if from_megatron or options.checkpoint_version is None else options.checkpoint_version
        ranks = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
        return plan_megatron(model, dtype, *ranks, version, options.megatron_names)
    from holdfast.conversion.holdfast_checkpoint import plan_holdfast

    return plan_holdfast(model, dtype, tokenizer.names if tokenizer else {}, options.destination)
