"""The verbs of the data stage: tokenizer train, preprocess, merge."""

import sys
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from holdfast.config import TokenizerType

BAD_LINES_EXIT_CODE = 3


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Text to a Megatron dataset: PREFIX_KEY_document.bin and .idx, byte for byte as Megatron's preprocess_data.py writes them.

    A call that was killed continues where it was when it is repeated. Exit code 3: done, but bad lines were skipped.

    Examples:

      holdfast preprocess --input corpus.jsonl --output-prefix corpus --append-eod \\
          --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt
      holdfast preprocess --input 'shards/*.jsonl.zst' --output-prefix wiki --split-sentences \\
          --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "input": "input and output",
        "tokenizer_type": "tokenizer",
        "append_eod": "documents and sentences",
        "workers": "processes",
        "log_interval": "reporting",
    }

    input: tuple[str, ...]
    """Files, globs, folders, or - for standard input: JSON lines, .txt, Wikipedia's .xml (plain or compressed), .parquet."""
    output_prefix: str
    """Where the dataset goes; the key and the level are added to it."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys (columns of Parquet) whose texts are tokenized, one dataset for each."""
    on_bad_line: Literal["fail", "skip"] = "fail"
    """fail stops at the first line that is not a document; skip leaves it out and lists it in PREFIX.bad.jsonl."""
    overwrite: bool = False
    """Replace a dataset that exists, and start over an unfinished run with other settings."""
    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """Megatron's name of the tokenizer."""
    vocab_file: str | None = None
    """vocab.json of a byte-level BPE, vocab.txt of BERT; or a catalog name such as gpt2."""
    merge_file: str | None = None
    """merges.txt of a byte-level BPE."""
    tokenizer_model: str | None = None
    """tokenizer.json or its folder, SentencePiece model, tiktoken file."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out what a tokenizer.json adds around each text."""
    tokenizer_engine: Literal["auto", "fast", "reference"] = "auto"
    """auto uses the fast engine where it is exact; reference is slow."""
    append_eod: bool = False
    """End each document with the end-of-document token."""
    split_sentences: bool = False
    """One sequence per sentence, for BERT; the level in the names is then "sentence"."""
    keep_newlines: bool = False
    """Keep line breaks at the end of sentences."""
    lang: str = "english"
    """Language of the sentences: ISO code or English name."""
    blank_line_documents: bool = False
    """A .txt file holds several documents, separated by blank lines, instead of one."""
    workers: int | None = None
    """Worker processes. Unset: one per core."""
    partitions: int = 1
    """Make the dataset in this many shares and join them."""
    partition_index: int | None = None
    """Make only this share (from 0); a call without it joins them."""
    log_interval: int | None = None
    """Print Megatron's progress line after every this many documents."""
    json: bool = False
    """Print the summary as JSON."""


def preprocess(options: PreprocessOptions) -> None:
    from holdfast.data.preprocess.options import preprocess as run
    from holdfast.system.progress import log

    values = asdict(options)
    as_json = values.pop("json")
    values["include_special_tokens"] = not values.pop("tokenizer_hf_no_include_special_tokens")
    summary = run(**values)
    for line in summary.lines():
        log(line)
    if as_json:
        import orjson

        print(orjson.dumps(asdict(summary)).decode())
    else:
        print("\n".join(summary.outputs))
    if summary.bad_lines:
        share = "" if options.partition_index is None else f"_{options.partition_index}"
        log(f"{_left_out(summary.bad_lines)}; see {options.output_prefix}{share}.bad.jsonl")
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
    if options.json:
        import orjson

        print(orjson.dumps(asdict(merged)).decode())
    else:
        print(merged.prefix)


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
    if options.json:
        import orjson

        print(orjson.dumps({"files": [str(path) for path in paths], "bad_lines": texts.bad_lines}).decode())
    else:
        print(*paths, sep="\n")
    if texts.bad_lines:
        log(_left_out(texts.bad_lines))
        sys.exit(BAD_LINES_EXIT_CODE)


def _left_out(bad_lines: int) -> str:
    from holdfast.system.progress import count_of

    return f"{count_of(bad_lines, 'bad line')} {'was' if bad_lines == 1 else 'were'} left out"
