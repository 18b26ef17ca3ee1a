"""A run of `preprocess`, from its options to the dataset: reads the tokenizer, finds the input, starts the workers, builds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.data.preprocess.options import PreprocessOptions
from holdfast.data.preprocess.units import most_units
from holdfast.data.preprocess.workers import WorkerPool
from holdfast.data.sources import InputFile
from holdfast.data.sources.inputs import find_inputs
from holdfast.system.errors import UsageError
from holdfast.tokenizers.recipe import Recipe, read_recipe

if TYPE_CHECKING:
    from holdfast.data.preprocess.provenance import Summary
    from holdfast.tokenizers.tokenizer import EngineChoice

SMALL_INPUT_BYTES = 64 << 10


def preprocess(
    input: Sequence[str | Path] | str | Path,
    output_prefix: str | Path,
    *,
    include_special_tokens: bool = True,
    **options: Any,
) -> "Summary":
    """Tokenizes documents into one .bin/.idx pair per key. A call that was cut off is continued by the same call.

    `options` are the other fields of PreprocessOptions; `include_special_tokens=False` leaves out what a tokenizer.json adds
    around each text.
    """
    names = [input] if isinstance(input, (str, Path)) else input
    values: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if "json_keys" in values:
        values["json_keys"] = tuple(values["json_keys"])
    return run(
        PreprocessOptions(
            input=tuple(map(str, names)),
            output_prefix=str(output_prefix),
            tokenizer_hf_no_include_special_tokens=not include_special_tokens,
            **values,
        )
    )


def run(options: PreprocessOptions) -> "Summary":
    options.check()
    recipe = read_recipe(
        options.tokenizer_type,
        options.vocab_file,
        options.merge_file,
        options.tokenizer_model,
        special_tokens=not options.tokenizer_hf_no_include_special_tokens,
    )
    if options.append_eod and recipe.eod is None:
        raise UsageError(f"--append-eod: this {options.tokenizer_type} has no end-of-document token")
    files = find_inputs(options.input, options.blank_line_documents)
    bad_lines = Path(options.output_prefix + ".bad.jsonl").resolve()
    if any(file.path != "-" and Path(file.path).resolve() == bad_lines for file in files):
        raise UsageError(
            f"{bad_lines} is an input, and the list of bad lines would replace it: choose another --output-prefix"
        )
    engine = choose_engine(options.tokenizer_engine, recipe, files)
    with WorkerPool(min(options.worker_count, most_units(files))) as pool:
        # Slow to import: the workers load their own modules meanwhile.
        from holdfast.data.preprocess.build import DatasetBuild, build
        from holdfast.data.preprocess.partitions import build_partitions

        request = DatasetBuild(options, tuple(files), recipe, engine, options.output_prefix)
        pool.set_up(request.worker_setup())
        return build(request, pool) if options.partitions == 1 else build_partitions(request, pool)


def choose_engine(wanted: "EngineChoice", recipe: Recipe, files: Sequence[InputFile]) -> "EngineChoice":
    """The reference engine for a small input: it is done before the fast engine has built its tables."""
    plain = all(not file.compression and file.path != "-" for file in files)
    small = plain and sum(file.size for file in files) < SMALL_INPUT_BYTES
    slow_to_build = recipe.family == "json" and not recipe.looks_like_bert
    return "reference" if wanted == "auto" and small and slow_to_build else wanted
