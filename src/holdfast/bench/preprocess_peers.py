"""What people use instead of `holdfast preprocess`, each from JSON lines to a .bin/.idx pair, run in a process of its own.

Called as `python -m holdfast.bench.preprocess_peers PEER INPUT PREFIX VOCAB MERGES WORKERS`. Each peer is used as its own
documentation uses it for bulk work, and writes the same bytes with the same small writer.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from holdfast.data.indexed import IndexPart, publish_pairs, write_index
from holdfast.tokenizers import read_recipe

LINES = 512


def batches(source: str) -> Iterator[list[str]]:
    with open(source, "rb") as file:
        while lines := file.readlines(LINES * 4096):
            yield [orjson.loads(line)["text"] for line in lines]


class Writer:
    """Appends documents with their end token; the least that any of the peers needs."""

    def __init__(self, prefix: str, eod: int) -> None:
        self._prefix, self._eod = prefix, np.array([eod], np.uint16)
        self._file = open(prefix + ".bin.part", "wb")  # noqa: SIM115
        self._lengths: list[int] = []

    def add(self, documents: Sequence[Any]) -> None:
        for ids in documents:
            self._file.write(np.asarray(ids, np.uint16).tobytes())
            self._file.write(self._eod.tobytes())
            self._lengths.append(len(ids) + 1)

    def close(self) -> None:
        self._file.close()
        lengths = np.array(self._lengths, np.int32)
        idx = Path(self._prefix + ".idx.part")
        write_index(idx, np.uint16, [IndexPart(lengths, np.arange(1, len(lengths) + 1))])
        publish_pairs([(Path(self._prefix + ".bin.part"), idx, self._prefix)])


def with_tiktoken(source: str, writer: Writer, vocab: str, merges: str, workers: int) -> None:
    import tiktoken

    from holdfast.tokenizers.tiktoken_files import GPT2_PATTERN

    vocabulary = orjson.loads(Path(vocab).read_bytes())
    ranks = {_bytes_of(token): number for token, number in vocabulary.items() if token != "<|endoftext|>"}
    special = {"<|endoftext|>": vocabulary["<|endoftext|>"]}
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    for texts in batches(source):
        writer.add(encoding.encode_ordinary_batch(texts, num_threads=workers))


def _bytes_of(token: str) -> bytes:
    """GPT-2 writes bytes as printable characters; this turns them back."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in printable]
    table = {chr(number): number for number in printable} | {chr(256 + at): number for at, number in enumerate(others)}
    return bytes(table[character] for character in token)


def with_tokenizers(source: str, writer: Writer, vocab: str, merges: str, workers: int) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(read_recipe("GPT2BPETokenizer", vocab, merges).definition)
    for texts in batches(source):
        writer.add([encoding.ids for encoding in tokenizer.encode_batch_fast(texts)])


def with_gigatoken(source: str, writer: Writer, vocab: str, merges: str, workers: int) -> None:
    import gigatoken
    import tokenizers

    definition = read_recipe("GPT2BPETokenizer", vocab, merges).definition
    tokenizer = gigatoken.Tokenizer(tokenizers.Tokenizer.from_str(definition))
    documents = tokenizer.encode_files(gigatoken.JsonlFileSource([source], field="text"), parallel=True)
    writer.add([np.asarray(ids) for ids in documents])


PEERS = {"tiktoken": with_tiktoken, "tokenizers": with_tokenizers, "gigatoken": with_gigatoken}


def main(peer: str, source: str, prefix: str, vocab: str, merges: str, workers: str) -> None:
    eod = orjson.loads(Path(vocab).read_bytes())["<|endoftext|>"]
    writer = Writer(prefix, eod)
    PEERS[peer](source, writer, vocab, merges, int(workers))
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
