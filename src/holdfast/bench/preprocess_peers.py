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
from holdfast.tokenizers import Recipe, read_recipe

LINES = 512


def batches(source: str) -> Iterator[list[str]]:
    with open(source, "rb") as file:
        while lines := file.readlines(LINES * 4096):
            yield [orjson.loads(line)["text"] for line in lines]


class PairWriter:
    """Writes documents with their end token to a .bin/.idx pair, the same way for every peer."""

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


def with_tiktoken(source: str, writer: PairWriter, vocab: str, merges: str, workers: int) -> None:
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


def with_tokenizers(source: str, writer: PairWriter, vocab: str, merges: str, workers: int) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(read_recipe("GPT2BPETokenizer", vocab, merges).definition)
    for texts in batches(source):
        writer.add([encoding.ids for encoding in tokenizer.encode_batch_fast(texts)])


def with_gigatoken(source: str, writer: PairWriter, vocab: str, merges: str, workers: int) -> None:
    import gigatoken
    import tokenizers

    definition = read_recipe("GPT2BPETokenizer", vocab, merges).definition
    tokenizer = gigatoken.Tokenizer(tokenizers.Tokenizer.from_str(definition))
    documents = tokenizer.encode_files(gigatoken.JsonlFileSource([source], field="text"), parallel=True)
    writer.add([np.asarray(ids) for ids in documents])


PEERS = {"tiktoken": with_tiktoken, "tokenizers": with_tokenizers, "gigatoken": with_gigatoken}


MEGATRON = {"megatron": "preprocess_data.py", "megatron-fast": "preprocess_data_fast.py"}


class Megatron:
    """A checkout of Megatron-LM, whose scripts load their tokenizer from a folder that is written here, not from a hub."""

    def __init__(self, checkout: str, python: str, work: Path) -> None:
        self._checkout, self._python, self._work = checkout, python, work

    def command(self, name: str, source: Path, prefix: str, recipe: Recipe, *flags: str) -> list[str]:
        folder = self._work / f"tokenizer-{recipe.digest[:8]}"
        if not folder.exists():
            folder.mkdir()
            (folder / "tokenizer.json").write_text(recipe.definition, encoding="utf-8")
            gpt = recipe.cls is None
            names = {"eos_token": "<|endoftext|>"} if gpt else {"unk_token": "[UNK]", "sep_token": "[SEP]"}
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
            (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
        offline = ["env", f"PYTHONPATH={self._checkout}", "HF_HUB_OFFLINE=1"]
        words = [*offline, self._python, f"{self._checkout}/tools/{MEGATRON[name]}", "--input", str(source)]
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
        return [*words, "--output-prefix", prefix, *tokenizer, *flags]


def main(peer: str, source: str, prefix: str, vocab: str, merges: str, workers: str) -> None:
    eod = orjson.loads(Path(vocab).read_bytes())["<|endoftext|>"]
    writer = PairWriter(prefix, eod)
    PEERS[peer](source, writer, vocab, merges, int(workers))
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
