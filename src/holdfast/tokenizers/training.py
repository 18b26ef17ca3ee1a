"""Trains a tokenizer on the user's own text with the tokenizers library, in the usual file formats.

Byte-level BPE gives GPT-2's vocab.json and merges.txt, WordPiece gives BERT's vocab.txt; the same texts give the same files.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

from holdfast.system.atomic_files import check_can_write, publish_bytes
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers.recipe import BERT_SPECIAL, END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import normalizers

TokenizerKind = Literal["bpe", "wordpiece", "wordpiece-cased"]
FILE_NAMES: dict[TokenizerKind, tuple[str, ...]] = {
    "bpe": ("vocab.json", "merges.txt"),
    "wordpiece": ("vocab.txt",),
    "wordpiece-cased": ("vocab.txt",),
}
CACHED_CHARACTERS = 50_000_000
INTERRUPT_SECONDS = 0.5


def train_tokenizer(
    texts: Iterable[str],
    output_dir: Path | str,
    vocab_size: int,
    kind: TokenizerKind = "bpe",
    *,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Learns a vocabulary of at most `vocab_size` tokens and publishes its files; returns their paths.

    Files that exist already are kept, and the call fails, unless `overwrite` is set: datasets and runs depend on them.
    For a WordPiece vocabulary the texts are read twice; those of an iterator are kept in memory for that.
    """
    folder = Path(output_dir)
    existing = [folder / name for name in FILE_NAMES[kind] if (folder / name).exists()]
    if existing and not overwrite:
        raise HoldfastError(
            f"{existing[0]} exists already; choose another --output-dir, or pass --overwrite to replace the tokenizer"
        )
    check_can_write(folder / FILE_NAMES[kind][0])
    smallest = 257 if kind == "bpe" else len(BERT_SPECIAL) + 2
    if vocab_size < smallest:
        raise UsageError(f"--vocab-size {vocab_size} is too small: a {kind} vocabulary starts at {smallest}")
    if kind != "bpe" and isinstance(texts, Iterator):
        texts = list(texts)
    counted = _CountedTexts(texts)
    files = _interruptibly(
        lambda: (
            _train_bpe(counted, vocab_size)
            if kind == "bpe"
            else _train_wordpiece(counted, vocab_size, kind == "wordpiece")
        ),
        counted,
    )
    if not counted.characters:
        raise HoldfastError("the input holds no text to learn a vocabulary from")
    for path in existing:  # a vocabulary must not be found beside the merges of another one
        path.unlink()
    for name, content in files.items():
        publish_bytes(folder / name, content)
    return tuple(folder / name for name in files)


class _CountedTexts:
    """Counts the characters of the texts that pass; raises once `stopped` is set."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts, self.characters, self.stopped = texts, 0, False

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            if self.stopped:
                raise HoldfastError("training was interrupted")
            self.characters += len(text)
            yield text


def _interruptibly(learn: Callable[[], dict[str, bytes]], texts: _CountedTexts) -> dict[str, bytes]:
    """Runs `learn` in a thread that ends with the program: the library does not react to Ctrl-C for minutes."""
    result: Future[dict[str, bytes]] = Future()

    def work() -> None:
        try:
            result.set_result(learn())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        # A wait without a limit can miss a Ctrl-C that arrives as it begins.
        while thread.is_alive():
            thread.join(INTERRUPT_SECONDS)
        return result.result()
    except KeyboardInterrupt:
        texts.stopped = True
        thread.join(INTERRUPT_SECONDS)
        raise


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
    """Reads the characters first, then learns.

    The library numbers the characters that continue a word (##a) as they come out of a hash table, and of equally frequent pairs
    prefers the one with the lower numbers. Given to it in their order, as special tokens, they have the same numbers every time.
    """
    counts: Counter[str] = Counter()
    first = set(_learn_wordpiece(_counting(texts, counts), 0, lowercase, BERT_SPECIAL)) - set(BERT_SPECIAL)
    inside = {piece[2:] for piece in first if len(piece) == 3 and piece.startswith("##")}
    alphabet = _most_frequent({piece for piece in first if len(piece) == 1}, inside, counts, vocab_size, lowercase)
    special = [*BERT_SPECIAL, *(f"##{character}" for character in alphabet if character in inside)]
    return {"vocab.txt": "\n".join([*_learn_wordpiece(texts, vocab_size, lowercase, special, alphabet), ""]).encode()}


def _most_frequent(
    characters: set[str], inside: set[str], counts: Counter[str], vocab_size: int, lowercase: bool
) -> list[str]:
    """All characters if the vocabulary has room for them; if not, the most frequent ones, and half of it is left for words."""
    room = vocab_size - len(BERT_SPECIAL)
    if len(characters) + len(inside) <= room:
        return sorted(characters)
    normalizer = _bert_normalizer(lowercase)
    frequency: Counter[str] = Counter()
    for character, count in counts.items():
        for part in normalizer.normalize_str(character):
            frequency[part] += count
    kept, taken = [], 0
    for character in sorted(characters, key=lambda one: (-frequency[one], one)):
        taken += 2 if character in inside else 1
        if taken > max(room // 2, 2):
            break
        kept.append(character)
    return sorted(kept)


def _learn_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    lowercase: bool,
    special: Sequence[str],
    alphabet: Sequence[str] | None = None,
) -> list[str]:
    """The pieces in their order. Of an `alphabet` no other character is used; without one it is that of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = _bert_normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=list(alphabet or ()),
        limit_alphabet=sys.maxunicode + 1 if alphabet is None else len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _bert_normalizer(lowercase: bool) -> "normalizers.BertNormalizer":
    from tokenizers import normalizers

    return normalizers.BertNormalizer(lowercase=lowercase)


def _counting(texts: Iterable[str], counts: Counter[str]) -> Iterator[str]:
    """Yields the words of the texts, most of them once: every character in every position, in a fraction of the time."""
    seen: set[str] = set()
    cached = 0
    for text in texts:
        counts.update(text)
        if cached > CACHED_CHARACTERS:
            seen, cached = set(), 0
        new = " ".join(set(text.split(" ")) - seen)
        seen.update(new.split(" "))
        cached += len(new)
        yield new
