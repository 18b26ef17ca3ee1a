"""The verbs of the data stage: tokenizer train, preprocess, merge."""

import os
import sys
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast.command_line.results import print_result
from holdfast.data.preprocess.options import PreprocessOptions

BAD_LINES_EXIT_CODE = 3


def preprocess(options: PreprocessOptions) -> None:
    from holdfast.data.preprocess.workers import SINGLE_THREADED

    # Read by numpy when it is loaded: this process computes nothing that is worth threads.
    os.environ.update(SINGLE_THREADED)
    from holdfast.data.preprocess.run import run
    from holdfast.system.progress import log

    summary = run(options)
    for line in summary.lines():
        log(line)
    print_result(asdict(summary), "\n".join(summary.outputs), options.json, indent=False)
    if summary.bad_lines:
        partition = "" if options.partition_index is None else f"_{options.partition_index}"
        log(f"{_left_out(summary.bad_lines)}; see {options.output_prefix}{partition}.bad.jsonl")
        sys.exit(BAD_LINES_EXIT_CODE)


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Join datasets into one.

    Examples:

      holdfast merge --input parts/ --output-prefix whole
      holdfast merge --input a_text_document b_text_document --output-prefix both
    """

    input: tuple[str, ...]
    """Folders that hold .bin/.idx pairs (joined in the order of their names), or prefixes of pairs, in their order."""
    output_prefix: str
    """Prefix of the pair to write."""
    overwrite: bool = False
    """Replace a pair that exists."""
    json: bool = False
    """Print the counts as JSON."""


def merge(options: MergeOptions) -> None:
    from holdfast.data.merge import merge as run
    from holdfast.system.progress import count_of, log

    merged = run(options.input, options.output_prefix, overwrite=options.overwrite)
    counts = [count_of(merged.documents, "document"), count_of(merged.sequences, "sequence")]
    log(f"{count_of(merged.parts, 'part')}: {', '.join(counts)}, {count_of(merged.bin_bytes, 'byte')}")
    print_result(asdict(merged), str(merged.prefix), options.json, indent=False)


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainOptions:
    """Train a tokenizer on your own text: vocab.json and merges.txt (bpe), or vocab.txt (wordpiece).

    Examples:

      holdfast tokenizer train --input corpus.jsonl --vocab-size 32000 --output-dir tokenizer
      holdfast tokenizer train --input corpus.jsonl --type wordpiece --output-dir bert-tokenizer
    """

    input: tuple[str, ...]
    """As for preprocess: files, globs, folders; JSON lines, .parquet, .txt, plain or compressed."""
    output_dir: str
    """Folder for the files."""
    vocab_size: int = 32000
    """Number of tokens. A wordpiece vocabulary too small for all characters keeps the frequent ones."""
    type: Literal["bpe", "wordpiece", "wordpiece-cased"] = "bpe"
    """bpe is GPT-2's byte-level BPE; wordpiece is BERT's, lower-cased or cased."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys whose texts are used."""
    on_bad_line: Literal["fail", "skip"] = "fail"
    """fail stops at the first line that is not a document; skip leaves such lines out."""
    overwrite: bool = False
    """Replace a tokenizer that is in the folder. Runs keep a copy of their own; datasets do not."""
    json: bool = False
    """Print the paths as JSON."""


def train_tokenizer(options: TokenizerTrainOptions) -> None:
    from holdfast.data.sources.texts import Texts
    from holdfast.system.progress import log, progress
    from holdfast.tokenizers.training import train_tokenizer as train

    with progress("tokenizer train") as bar:
        texts = Texts(options.input, options.json_keys, options.on_bad_line, bar)
        # Standard input cannot be read again.
        source = iter(texts) if "-" in options.input else texts
        paths = train(source, options.output_dir, options.vocab_size, options.type, overwrite=options.overwrite)
    files = [str(path) for path in paths]
    print_result({"files": files, "bad_lines": texts.bad_lines}, "\n".join(files), options.json, indent=False)
    if texts.bad_lines:
        log(_left_out(texts.bad_lines))
        sys.exit(BAD_LINES_EXIT_CODE)


def _left_out(bad_lines: int) -> str:
    from holdfast.system.progress import count_of

    return f"{count_of(bad_lines, 'bad line')} {'was' if bad_lines == 1 else 'were'} left out"
