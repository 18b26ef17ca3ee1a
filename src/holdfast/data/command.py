"""The verbs of the data stage: tokenizer train, preprocess, merge."""

import sys
from typing import Literal

from holdfast.config import TokenizerType
from holdfast.flags import Words, words

TEXT = words("text")
BAD_LINES_EXIT_CODE = 3


def preprocess(
    *,
    input: Words,
    output_prefix: str,
    tokenizer_type: TokenizerType = "GPT2BPETokenizer",
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    tokenizer_hf_no_include_special_tokens: bool = False,
    tokenizer_engine: Literal["auto", "fast", "reference"] = "auto",
    json_keys: Words = TEXT,
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
    json: bool = False,
) -> None:
    """Text to a Megatron dataset: PREFIX_KEY_document.bin and .idx, byte for byte as Megatron's preprocess_data.py writes them.

    holdfast preprocess --input corpus.jsonl --output-prefix corpus --vocab-file vocab.json --merge-file merges.txt --append-eod

    holdfast preprocess --input 'shards/*.jsonl.zst' --output-prefix wiki --split-sentences
    --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt

    A call that was killed goes on where it was when it is repeated. Exit code 3: done, but bad lines were skipped.

    Args:
        input: Files, globs, folders, or - for standard input: JSON lines, .txt, Wikipedia's .xml (plain or compressed), .parquet.
        output_prefix: Where the dataset goes; the key and the level are added to it.
        tokenizer_type: Megatron's name of the tokenizer.
        vocab_file: vocab.json of a byte-level BPE, vocab.txt of BERT; or a catalog name such as gpt2.
        merge_file: merges.txt of a byte-level BPE.
        tokenizer_model: tokenizer.json or its folder, SentencePiece model, tiktoken file.
        tokenizer_hf_no_include_special_tokens: Leave out what a tokenizer.json adds around each text.
        tokenizer_engine: auto takes the fast engine where it is exact; reference is slow.
        json_keys: Keys (columns of Parquet) whose texts are tokenized, a dataset each.
        append_eod: End each document with the end-of-document token.
        split_sentences: A sequence per sentence, for BERT; the level in the names is then "sentence".
        keep_newlines: Keep line breaks at the end of sentences.
        lang: Language of the sentences: ISO code or English name.
        blank_line_documents: A .txt file holds several documents, separated by blank lines, instead of one.
        workers: Worker processes; as many as there are cores when not given.
        partitions: Make the dataset in this many shares and join them.
        partition_index: Make only this share (from 0); a call without it joins them.
        on_bad_line: fail stops at the first line that is no document; skip leaves it out and lists it in PREFIX.bad.jsonl.
        overwrite: Replace a dataset that is there, and start over an unfinished run with other settings.
        log_interval: Print Megatron's progress line every so many documents.
        json: Print the summary as JSON.
    """
    from dataclasses import asdict

    from holdfast.data.preprocess import preprocess as run
    from holdfast.progress import say

    summary = run(
        input,
        output_prefix,
        tokenizer_type=tokenizer_type,
        vocab_file=vocab_file,
        merge_file=merge_file,
        tokenizer_model=tokenizer_model,
        include_special_tokens=not tokenizer_hf_no_include_special_tokens,
        tokenizer_engine=tokenizer_engine,
        json_keys=json_keys,
        append_eod=append_eod,
        split_sentences=split_sentences,
        keep_newlines=keep_newlines,
        lang=lang,
        blank_line_documents=blank_line_documents,
        workers=workers,
        partitions=partitions,
        partition_index=partition_index,
        on_bad_line=on_bad_line,
        overwrite=overwrite,
        log_interval=log_interval,
    )
    for line in summary.lines():
        say(line)
    if json:
        import orjson

        print(orjson.dumps(asdict(summary)).decode())
    else:
        print("\n".join(summary.outputs))
    if summary.bad_lines:
        say(f"{summary.bad_lines:,} bad lines were left out; they are listed in {output_prefix}.bad.jsonl")
        sys.exit(BAD_LINES_EXIT_CODE)


def merge(
    *,
    input: Words,
    output_prefix: str,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Join datasets into one.

    holdfast merge --input parts/ --output-prefix whole

    Args:
        input: Folders that hold .bin/.idx pairs (taken in the order of their names), or prefixes of pairs, in their order.
        output_prefix: Prefix of the pair to write.
        overwrite: Replace a pair that is there.
        json: Print the counts as JSON.
    """
    from dataclasses import asdict

    from holdfast.data.merge import merge as run
    from holdfast.progress import say

    merged = run(input, output_prefix, overwrite=overwrite)
    say(
        f"{merged.parts:,} parts: {merged.documents:,} documents, {merged.sequences:,} sequences, {merged.bin_bytes:,} bytes"
    )
    if json:
        import orjson

        print(orjson.dumps(asdict(merged)).decode())
    else:
        print(merged.prefix)


def train_tokenizer(
    *,
    input: Words,
    output_dir: str,
    vocab_size: int = 32000,
    type: Literal["bpe", "wordpiece", "wordpiece-cased"] = "bpe",
    json_keys: Words = TEXT,
    on_bad_line: Literal["fail", "skip"] = "fail",
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Learn a tokenizer from your own text: vocab.json and merges.txt (bpe), or vocab.txt (wordpiece).

    holdfast tokenizer train --input corpus.jsonl --vocab-size 32000 --output-dir tokenizer

    Args:
        input: As for preprocess: files, globs, folders; JSON lines, .parquet, .txt, plain or compressed.
        output_dir: Folder for the files.
        vocab_size: Number of tokens to learn. A wordpiece vocabulary too small for all characters keeps the frequent ones.
        type: bpe is GPT-2's byte-level BPE; wordpiece is BERT's, lower-cased or cased.
        json_keys: Keys whose texts are learnt from.
        on_bad_line: fail stops at the first line that is no document; skip leaves such lines out.
        overwrite: Replace a tokenizer that is in the folder. Runs keep a copy of their own; datasets do not.
        json: Print the paths as JSON.
    """
    from holdfast.data.texts import Texts
    from holdfast.progress import progress, say
    from holdfast.tokenizers.training import train_tokenizer as train

    with progress("tokenizer train") as bar:
        texts = Texts(input, json_keys, on_bad_line, bar)
        # Standard input cannot be read again.
        paths = train(iter(texts) if "-" in input else texts, output_dir, vocab_size, type, overwrite=overwrite)
    if json:
        import orjson

        print(orjson.dumps({"files": [str(path) for path in paths], "bad_lines": texts.bad_lines}).decode())
    else:
        print(*paths, sep="\n")
    if texts.bad_lines:
        say(f"{texts.bad_lines:,} bad lines were left out")
        sys.exit(BAD_LINES_EXIT_CODE)
