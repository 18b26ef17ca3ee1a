"""The declaration of `preprocess`: its options, for the command line and for the library alike."""

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from holdfast.config import TokenizerType
from holdfast.system.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Text to a Megatron dataset: PREFIX_KEY_document.bin and .idx, byte for byte as Megatron's preprocess_data.py writes them.

    Repeat a call that was killed, and it resumes. Exit code 3: done, but bad lines were skipped.

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
    """Build the dataset in this many partitions and join them."""
    partition_index: int | None = None
    """Build only this partition (from 0); a call without it joins them."""
    log_interval: int | None = None
    """Print Megatron's progress line after every this many documents."""
    json: bool = False
    """Print the summary as JSON."""

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def check(self) -> None:
        """Raises UsageError for values that contradict each other or are out of range."""
        if self.output_prefix.endswith("/"):
            raise UsageError(
                f"--output-prefix {self.output_prefix} is a folder: add the beginning of the files' names to it"
            )
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            raise UsageError("--json-keys takes one or more different keys")
        if any("/" in key or not key for key in self.json_keys):
            raise UsageError(
                "--json-keys: a key becomes part of the names of the files, so it cannot be empty or hold a slash"
            )
        counts = (self.workers, self.partitions, self.log_interval)
        if any(count is not None and count < 1 for count in counts):
            raise UsageError("--workers, --partitions and --log-interval must be at least 1")
        if self.partition_index is not None and self.partitions == 1:
            raise UsageError("--partition-index needs --partitions N")
        if self.partitions > 1 and "-" in self.input:
            raise UsageError("standard input cannot be partitioned: --partitions takes files")
        if self.partition_index is not None and not 0 <= self.partition_index < self.partitions:
            raise UsageError(
                f"--partition-index {self.partition_index}: partitions count from 0 to {self.partitions - 1}"
            )
