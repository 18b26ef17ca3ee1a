"""The verb `evaluate`: its flags, and the text of its results."""

import importlib.util
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import count_of
from holdfast.tokenizers.options import TokenizerOptions


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TokenizerOptions):
    """Measure a trained model: perplexity of your own text, and tasks of lm-evaluation-harness.

    Examples:

      holdfast evaluate runs/first --data-path heldout.jsonl
      holdfast evaluate runs/first --data-path corpus_text_document --split 969,30,1 --part test
      holdfast evaluate first-hf --tasks hellaswag,lambada_openai,arc_easy --json
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "data_path": "perplexity",
        "tasks": "tasks",
        "vocab_file": "tokenizer",
        "json": "flags",
    }

    model: str = field(metadata=positional())
    """Hugging Face folder, run folder, checkpoint (step-...) folder, or Megatron checkpoint."""
    json: bool = False
    """Print one JSON object with the keys perplexity and tasks."""
    limit: int | None = None
    """Score this many documents, and this many examples of each task, at most."""
    data_path: tuple[str, ...] = ()
    """Text files in any format that preprocess reads, or prefixes of .bin/.idx pairs."""
    json_key: str = "text"
    """Key of the text in JSON lines."""
    split: str | None = None
    """Shares of a .bin/.idx pair for training, validation and test, as in training. Unset: all documents are scored."""
    part: Literal["train", "valid", "test"] = "valid"
    """Part of the split to score."""
    tasks: str | None = None
    """Names of tasks, separated by commas. Needs the extra evaluate; the harness downloads the data of its tasks."""
    num_fewshot: int | None = None
    """Examples that precede each question. Unset: the task's own number."""
    include_path: Path | None = None
    """Folder with task definitions of your own. A definition may run code: use only what you trust."""


def evaluate_command(options: EvaluateOptions) -> None:
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit}: give 1 or more")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UsageError(f"--num-fewshot {options.num_fewshot}: give 0 or more")
    tasks = [task.strip() for task in (options.tasks or "").split(",") if task.strip()]
    if not options.data_path and not tasks:
        raise UsageError("give --data-path FILE for perplexity, or --tasks NAME,NAME, or both")
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise HoldfastError("--tasks needs lm-evaluation-harness: pip install 'holdfast[evaluate]'")
    from holdfast.generation.loading import load_model

    loaded = load_model(options.model, tokenizer=options.tokenizer_names())
    found: dict[str, Any] = {}
    if options.data_path:
        found["perplexity"] = {name: _perplexity(loaded, name, options) for name in options.data_path}
    if tasks:
        from holdfast.evaluation.harness import evaluate_tasks

        found["tasks"] = evaluate_tasks(
            loaded,
            tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            include_path=options.include_path,
        )
    print_result(found, table(found), options.json)


def _perplexity(loaded: Any, name: str, options: EvaluateOptions) -> dict[str, Any]:
    import itertools

    from holdfast.data.indexed import IndexedDataset
    from holdfast.evaluation.perplexity import dataset_documents, measure, text_documents

    if IndexedDataset.exists(name):
        documents = dataset_documents(loaded, name, options.split, options.part)
    elif options.split is not None:
        raise UsageError(f"--split divides .bin/.idx pairs, but {name} is a text file; leave it out")
    else:
        documents = text_documents(loaded, [name], options.json_key)
    return asdict(measure(loaded, itertools.islice(documents, options.limit), options.limit))


def table(found: dict[str, Any]) -> str:
    """The results as text."""
    lines = []
    for name, result in found.get("perplexity", {}).items():
        lines.append(
            f"{name}: perplexity {result['perplexity']:,.3f}, {result['bits_per_byte']:.4f} bits per byte, "
            f"loss {result['loss']:.4f} ({count_of(result['tokens'], 'token')}, {count_of(result['bytes'], 'byte')}, "
            f"{count_of(result['documents'], 'document')})"
        )
    for task, metrics in found.get("tasks", {}).items():
        for key, value in metrics.items():
            metric, comma, how = key.partition(",")
            if comma and isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{how}")
                margin = f" ± {error:.4f}" if isinstance(error, float) else ""
                lines.append(f"{task}: {metric} {value:.4f}{margin}" + ("" if how == "none" else f" ({how})"))
    return "\n".join(lines)
