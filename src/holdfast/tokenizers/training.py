"""Training a tokenizer on the user's own text, with the tokenizers library, in the formats that everyone reads.

Byte-level BPE gives GPT-2's vocab.json and merges.txt; the same texts give the same files. WordPiece gives BERT's vocab.txt;
there the library orders equally frequent pieces differently from run to run.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import orjson

from holdfast.errors import HoldfastError, UsageError
from holdfast.publish import publish_bytes
from holdfast.tokenizers.recipe import END_OF_TEXT

TokenizerKind = Literal["bpe", "wordpiece", "wordpiece-cased"]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(
    texts: Iterable[str], output_dir: Path | str, vocab_size: int, kind: TokenizerKind = "bpe"
) -> tuple[Path, ...]:
    """Learns a vocabulary of at most `vocab_size` tokens and publishes its files; returns their paths."""
    folder = Path(output_dir)
    smallest = 257 if kind == "bpe" else len(BERT_SPECIAL) + 1
    if vocab_size < smallest:
        raise UsageError(f"--vocab-size {vocab_size} is too small: a {kind} vocabulary starts at {smallest}")
    counted = _Counted(texts)
    files = (
        _train_bpe(counted, vocab_size) if kind == "bpe" else _train_wordpiece(counted, vocab_size, kind == "wordpiece")
    )
    if not counted.characters:
        raise HoldfastError("the input holds no text to learn a vocabulary from")
    for name, content in files.items():
        publish_bytes(folder / name, content)
    return tuple(folder / name for name in files)


class _Counted:
    """Texts as they pass, with the number of characters seen."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts, self.characters = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text


def _train_bpe(texts: Iterable[str], vocab_size: int) -> dict[str, bytes]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # <|endoftext|> takes the last id, as in GPT-2.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = orjson.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocabulary.pop(END_OF_TEXT, None)
    vocabulary = {token: number for number, token in enumerate(vocabulary)}
    vocabulary[END_OF_TEXT] = len(vocabulary)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "vocab.json": orjson.dumps(vocabulary),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
    }


def _train_wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool) -> dict[str, bytes]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=BERT_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {"vocab.txt": "\n".join([*tokens, ""]).encode()}
