"""Text to a Megatron dataset, as a function: checks what it was asked, starts the workers and has the dataset made."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.data.preprocess.sentences import language_code
from holdfast.data.preprocess.workers import Crew
from holdfast.data.sources import InputFile
from holdfast.data.sources.inputs import find_inputs
from holdfast.system.errors import UsageError
from holdfast.tokenizers import tables
from holdfast.tokenizers.recipe import Recipe, read_recipe

if TYPE_CHECKING:
    from holdfast.data.preprocess.provenance import Summary

SMALL_INPUT_BYTES = 64 << 10


def preprocess(
    input: Sequence[str | Path] | str | Path,
    output_prefix: str | Path,
    *,
    tokenizer_type: str = "GPT2BPETokenizer",
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    include_special_tokens: bool = True,
    tokenizer_engine: Literal["auto", "fast", "reference"] = "auto",
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    split_sentences: bool = False,
    keep_newlines: bool = False,
    lang: str = "english",
    blank_line_documents: bool = False,
    workers: int | None = None,
    partitions: int = 1,
    partition_index: int | None = None,
    on_bad_line: Literal["fail", "skip"] = "fail",
    overwrite: bool = False,
    log_interval: int | None = None,
) -> "Summary":
    """Tokenizes documents into one .bin/.idx pair per key. A call that was cut off is continued by the same call."""
    names = [input] if isinstance(input, (str, Path)) else list(input)
    if str(output_prefix).endswith("/"):
        raise UsageError(f"--output-prefix {output_prefix} is a folder: add the beginning of the files' names to it")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise UsageError("--json-keys wants one or more different keys")
    if (workers is not None and workers < 1) or partitions < 1 or (log_interval is not None and log_interval < 1):
        raise UsageError("--workers, --partitions and --log-interval count from 1")
    if partition_index is not None and partitions == 1:
        raise UsageError("--partition-index belongs to --partitions N")
    workers = workers or len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        # Shares have crews of their own.
        crew = stack.enter_context(Crew(workers)) if partitions == 1 else None
        recipe = read_recipe(
            tokenizer_type, vocab_file, merge_file, tokenizer_model, special_tokens=include_special_tokens
        )
        if append_eod and recipe.eod is None:
            raise UsageError(f"--append-eod: this {tokenizer_type} has no end-of-document token")
        files = find_inputs(names, blank_line_documents)
        engine = engine_for(tokenizer_engine, recipe, files)
        if crew is not None:
            # The workers get ready while this process still loads what it needs itself.
            crew.prepare(recipe, engine)
        from holdfast.data.preprocess.run import Request, run

        request = Request(
            tuple(files),
            str(output_prefix),
            recipe,
            tuple(json_keys),
            append_eod,
            language_code(lang) if split_sentences else None,
            keep_newlines,
            workers,
            on_bad_line,
            overwrite,
            engine,
            log_interval,
        )
        if crew is not None:
            return run(request, crew)
    from holdfast.data.preprocess.partitions import preprocess_partitions

    return preprocess_partitions(request, partitions, partition_index)


def engine_for(wanted: str, recipe: Recipe, files: Sequence[InputFile]) -> str:
    """A small input is done with the reference engine before the fast one has built its tables."""
    plain = all(not file.compression and file.path != "-" for file in files)
    small = plain and sum(file.size for file in files) < SMALL_INPUT_BYTES
    return "reference" if wanted == "auto" and small and tables.are_needed(recipe, wanted) else wanted
