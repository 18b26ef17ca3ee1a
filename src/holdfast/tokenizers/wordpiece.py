"""BERT's WordPiece, fast: by tokie where that is exact; otherwise every word is looked up in a table of words seen before.

The table holds the ids of a word as bytes, so that a text is one cut, one map and one join, without a Python object per token.
BERT's normalizer treats characters one by one and its pre-tokenizer cuts at blanks and punctuation, so words are independent of
each other. Plain ASCII is cut here; other texts by their blank-delimited chunks, with the reference's own normalizer and
pre-tokenizer for those that are new. A text that holds a special token goes to the reference engine as a whole.
"""

import contextlib
import itertools
import re
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from holdfast.tokenizers.engines import FlatIds, ReferenceEngine
from holdfast.tokenizers.recipe import Recipe

# Python takes these for blanks where BERT's normalizer drops them as control characters.
_DROPPED_BLANKS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ASCII_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
CACHED_CHARACTERS, CACHE_ENTRIES = 40, 1 << 18
LONGEST_NATIVE = 32 << 10
_NEW, _SAME, _DIFFERENT = np.uint8(0), np.uint8(1), np.uint8(2)


def is_bert(definition: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is WordPiece behind BERT's own normalizer and pre-tokenizer."""
    normalizer = definition.get("normalizer") or {}
    return (
        definition.get("model", {}).get("type") == "WordPiece"
        and (definition.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and normalizer.get("type") == "BertNormalizer"
        and normalizer.get("clean_text") is True
        and normalizer.get("handle_chinese_chars") is True
        and normalizer.get("strip_accents") is None
    )


class PieceTable(dict[str, bytes]):
    """Maps a part of a text to the bytes of its ids (uint32); computes those of a new one, and keeps them while there is room."""

    compute: Callable[[str], bytes]

    def __missing__(self, text: str) -> bytes:
        found = self.compute(text)
        if len(text) <= CACHED_CHARACTERS:
            if len(self) >= CACHE_ENTRIES:
                self.clear()
            self[text] = found
        return found


class WordTable(PieceTable):
    """The table of words."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._vocabulary: dict[str, int] = model["vocab"]
        self._unknown = array("I", [self._vocabulary[model["unk_token"]]]).tobytes()
        self._prefix, self._longest = model["continuing_subword_prefix"], model["max_input_chars_per_word"]
        self._longest_piece = max(map(len, self._vocabulary))

    def compute(self, word: str) -> bytes:
        """The longest piece that fits, again and again; a word that cannot be covered is one unknown token."""
        if len(word) > self._longest:
            return self._unknown
        ids = array("I")
        start, length = 0, len(word)
        lookup = self._vocabulary.get
        while start < length:
            for end in range(min(length, start + self._longest_piece), start, -1):
                number = lookup(word[start:end] if start == 0 else self._prefix + word[start:end])
                if number is not None:
                    break
            else:
                return self._unknown
            ids.append(number)
            start = end
        return ids.tobytes()


class ChunkTable(PieceTable):
    """The table of the blank-delimited chunks of texts that are not plain ASCII."""

    def __init__(self, words: WordTable, lowercase: bool) -> None:
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        self._words, self._lowercase = words, lowercase
        self._normalize = BertNormalizer(lowercase=lowercase).normalize_str
        self._split = BertPreTokenizer().pre_tokenize_str

    def compute(self, chunk: str) -> bytes:
        if chunk.isascii():
            words = ascii_words(chunk, self._lowercase)
        else:
            words = [word for word, _ in self._split(self._normalize(chunk))]
        return b"".join(map(self._words.__getitem__, words))


def ascii_words(text: str, lowercase: bool) -> list[str]:
    """Normalized words and punctuation of an ASCII text."""
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
    words: list[str] = _ASCII_WORDS.findall(text.lower() if lowercase else text)
    return words


class TokieEngine:
    """tokie, for the texts that it computes as the reference does.

    It encodes some rare characters (mostly unassigned ones) and very long words differently. BERT's rules treat characters one by
    one, so each new character is compared with the reference once, in a few positions; a text with one that differs is unsafe.
    """

    def __init__(self, recipe: Recipe, reference: ReferenceEngine) -> None:
        import tokie

        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
            file.write(recipe.definition)
            file.flush()
            self._tokenizer: Any = tokie.Tokenizer.from_json(file.name)
        self._reference = reference
        self._classes = np.full(sys.maxunicode + 1, _NEW)
        if not all(self._agree([word * length for word in ("x", "é", "e\u0301") for length in (100, 101)])):
            raise ValueError("tokie cuts long words differently")

    def unsafe_texts(self, texts: Sequence[str], whole: str) -> set[int]:
        """The numbers of the texts that tokie may encode differently; `whole` is the texts joined by one character."""
        characters = np.frombuffer(whole.encode("utf-32-le", "surrogatepass"), np.uint32)
        classes = self._classes.take(characters)
        if not classes.all():
            self._classify(np.unique(characters[classes == _NEW]))
            classes = self._classes.take(characters)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        wrong = np.searchsorted(np.cumsum(lengths + 1), np.flatnonzero(classes == _DIFFERENT), side="right")
        return {*np.unique(wrong).tolist(), *np.flatnonzero(lengths > LONGEST_NATIVE).tolist()}

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        ids, lengths = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=False)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return ids, offsets

    def _classify(self, characters: npt.NDArray[np.uint32]) -> None:
        """Compares tokie with the reference for characters not seen before."""
        agree = self._agree([f"a{one}b {one} c{one}" for one in map(chr, characters.tolist())])
        self._classes[characters] = np.where(agree, _SAME, _DIFFERENT)

    def _agree(self, texts: Sequence[str]) -> list[bool]:
        """Whether it and the reference give the same ids, for each of the texts."""
        if not texts:
            return []
        found, wanted = (_split(*engine.encode_batch(texts)) for engine in (self, self._reference))
        return [one == other for one, other in zip(found, wanted, strict=True)]


class FastBertEngine:
    """tokie where it is installed and exact, the word table for other texts, the reference for texts with special tokens."""

    def __init__(self, recipe: Recipe) -> None:
        import tokenizers

        definition = orjson.loads(recipe.definition)
        if recipe.special_tokens and definition.get("post_processor"):
            raise ValueError("texts with special tokens around them need the reference engine")
        self.name = f"word table over tokenizers {tokenizers.__version__}"
        self._lowercase = bool(definition["normalizer"]["lowercase"])
        self._words = WordTable(definition["model"])
        self._chunks = ChunkTable(self._words, self._lowercase)
        added = definition.get("added_tokens") or []
        self._special = re.compile("|".join(map(re.escape, [token["content"] for token in added])) or "(?!)")
        # Such a token is also found in a text where it is written in another way, which the word table does not see.
        self._has_normalized = any(token.get("normalized") for token in added)
        self._reference = ReferenceEngine(recipe)
        self._native: TokieEngine | None = None
        with contextlib.suppress(ImportError, ValueError):
            self._native = TokieEngine(recipe, self._reference)
            self.name = f"tokie {version('tokie')}, {self.name}"

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        if self._native is None or not texts:
            return _concatenate([self._encode(text) for text in texts])
        whole = "\n".join(texts)
        unsafe_texts = self._native.unsafe_texts(texts, whole)
        if self._special.search(whole):
            unsafe_texts |= {n for n, text in enumerate(texts) if self._special.search(text)}
        if not unsafe_texts:
            return self._native.encode_batch(texts)
        ids, offsets = self._native.encode_batch(["" if n in unsafe_texts else text for n, text in enumerate(texts)])
        pieces = _split(ids, offsets)
        for n in unsafe_texts:
            pieces[n] = self._encode(texts[n])
        return _concatenate(pieces)

    def _encode(self, text: str) -> bytes:
        if self._has_normalized or self._special.search(text):
            return self._reference.encode_batch([text])[0].tobytes()
        if text.isascii():
            return b"".join(map(self._words.__getitem__, ascii_words(text, self._lowercase)))
        if _DROPPED_BLANKS.search(text):
            text = _DROPPED_BLANKS.sub("", text)
        return b"".join(map(self._chunks.__getitem__, text.split()))

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)


def _split(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> list[bytes]:
    """The ids of each text as bytes."""
    whole, bounds = ids.tobytes(), (offsets * 4).tolist()
    return [whole[begin:end] for begin, end in itertools.pairwise(bounds)]


def _concatenate(pieces: Sequence[bytes]) -> FlatIds:
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) // 4, out=offsets[1:])
    return np.frombuffer(b"".join(pieces), np.uint32), offsets
