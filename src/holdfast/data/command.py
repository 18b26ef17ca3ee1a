"""The verbs of the data stage: preprocess, tokenizer train."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
]


def preprocess(
    *,
    input: tuple[str, ...],
    output_prefix: str,
    tokenizer_type: TokenizerType = "GPT2BPETokenizer",
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    json_keys: tuple[str, ...] = ("text",),
    append_eod: bool = False,
    json: bool = False,
) -> None:
    """Text to a Megatron dataset: PREFIX_KEY_document.bin and .idx, byte for byte as Megatron's preprocess_data.py writes them.

    holdfast preprocess --input corpus.jsonl --output-prefix corpus --vocab-file vocab.json --merge-file merges.txt --append-eod

    Args:
        input: JSON-lines files.
        output_prefix: Where the dataset goes; the key and the level are added to it.
        tokenizer_type: Megatron's name of the tokenizer.
        vocab_file: vocab.json of a byte-level BPE, vocab.txt of BERT.
        merge_file: merges.txt of a byte-level BPE.
        tokenizer_model: tokenizer.json or its folder, SentencePiece model, tiktoken file.
        json_keys: Keys whose texts are tokenized, a dataset each.
        append_eod: End each document with the end-of-document token.
        json: Print the summary as JSON.
    """
    from dataclasses import asdict

    from holdfast.data.preprocess import preprocess as run

    summary = run(
        input,
        output_prefix,
        tokenizer_type=tokenizer_type,
        vocab_file=vocab_file,
        merge_file=merge_file,
        tokenizer_model=tokenizer_model,
        json_keys=json_keys,
        append_eod=append_eod,
    )
    if json:
        import orjson

        print(orjson.dumps(asdict(summary)).decode())
    else:
        print("\n".join(summary.outputs))


def train_tokenizer(
    *,
    input: tuple[str, ...],
    output_dir: str,
    vocab_size: int = 32000,
    type: Annotated[Literal["bpe", "wordpiece", "wordpiece-cased"], tyro.conf.arg(name="type")] = "bpe",
    json_keys: tuple[str, ...] = ("text",),
) -> None:
    """Learn a tokenizer from your own text: vocab.json and merges.txt (bpe), or vocab.txt (wordpiece).

    holdfast tokenizer train --input corpus.jsonl --vocab-size 32000 --output-dir tokenizer

    Args:
        input: JSON-lines files, or plain text files (ending in .txt).
        output_dir: Folder for the files.
        vocab_size: Number of tokens to learn.
        type: bpe is GPT-2's byte-level BPE; wordpiece is BERT's, lower-cased or cased.
        json_keys: Keys whose texts are learnt from.
    """
    from holdfast.tokenizers.training import train_tokenizer as train

    for path in train(_texts(input, json_keys), output_dir, vocab_size, type):
        print(path)


def _texts(paths: tuple[str, ...], keys: tuple[str, ...]) -> Iterator[str]:
    from holdfast.data.sources.jsonl import parse_lines
    from holdfast.errors import HoldfastError

    for path in map(Path, paths):
        if path.suffix == ".txt":
            yield path.read_text(errors="replace")
            continue
        with path.open("rb") as source:
            while lines := source.readlines(1 << 20):
                batch = parse_lines(b"".join(lines), keys)
                if batch.bad:
                    raise HoldfastError(f"{path}: bad line: {batch.bad[0].reason}")
                for column in batch.values:
                    for value in column:
                        yield from [value] if isinstance(value, str) else value
