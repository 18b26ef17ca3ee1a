"""BERT's WordPiece, fast: every word is looked up in a table of words that were seen before.

The table holds the ids of a word as bytes, so that a text is one cut, one map and one join, without a Python object per token.
BERT's normalizer treats characters one by one and its pre-tokenizer cuts at blanks and punctuation, so words are independent of
each other. Plain ASCII is cut here; other texts by their blank-delimited chunks, with the reference's own normalizer and
pre-tokenizer for those that are new. A text that holds a special token goes to the reference engine as a whole.
"""

import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from holdfast.tokenizers.engines import Flat, ReferenceEngine
from holdfast.tokenizers.recipe import Recipe

# Python takes these for blanks where BERT's normalizer drops them as control characters.
_DROPPED_BLANKS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ASCII_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
REMEMBERED_CHARACTERS, REMEMBERED = 40, 1 << 18


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


class Words(dict[str, bytes]):
    """Word to the bytes of its ids (uint32); a word that is not there is worked out, and kept while there is room."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._vocabulary: dict[str, int] = model["vocab"]
        self._unknown = array("I", [self._vocabulary[model["unk_token"]]]).tobytes()
        self._prefix, self._longest = model["continuing_subword_prefix"], model["max_input_chars_per_word"]
        self._longest_piece = max(map(len, self._vocabulary))

    def __missing__(self, word: str) -> bytes:
        found = self._pieces(word)
        if len(word) <= REMEMBERED_CHARACTERS:
            if len(self) >= REMEMBERED:
                self.clear()
            self[word] = found
        return found

    def _pieces(self, word: str) -> bytes:
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


class Chunks(dict[str, bytes]):
    """The same for blank-delimited chunks of a text that is not plain ASCII."""

    def __init__(self, words: Words, lowercase: bool) -> None:
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        self._words, self._lowercase = words, lowercase
        self._normalize = BertNormalizer(lowercase=lowercase).normalize_str
        self._cut = BertPreTokenizer().pre_tokenize_str

    def __missing__(self, chunk: str) -> bytes:
        if chunk.isascii():
            words = ascii_words(chunk, self._lowercase)
        else:
            words = [word for word, _ in self._cut(self._normalize(chunk))]
        found = b"".join(map(self._words.__getitem__, words))
        if len(chunk) <= REMEMBERED_CHARACTERS:
            if len(self) >= REMEMBERED:
                self.clear()
            self[chunk] = found
        return found


def ascii_words(text: str, lowercase: bool) -> list[str]:
    """Normalized words and punctuation of an ASCII text."""
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
    words: list[str] = _ASCII_WORDS.findall(text.lower() if lowercase else text)
    return words


class FastBertEngine:
    def __init__(self, recipe: Recipe) -> None:
        import tokenizers

        definition = orjson.loads(recipe.definition)
        if recipe.special_tokens and definition.get("post_processor"):
            raise ValueError("texts with special tokens around them are the reference engine's")
        self.name = f"word table over tokenizers {tokenizers.__version__}"
        self._lowercase = bool(definition["normalizer"]["lowercase"])
        self._words = Words(definition["model"])
        self._chunks = Chunks(self._words, self._lowercase)
        special = [token["content"] for token in definition.get("added_tokens") or []]
        self._special_start = special[0][0] if special and len({token[0] for token in special}) == 1 else ""
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._recipe = recipe
        self._reference: ReferenceEngine | None = None

    def encode_batch(self, texts: Sequence[str]) -> Flat:
        words, chunks = self._words.__getitem__, self._chunks.__getitem__
        pieces = []
        for text in texts:
            if self._special and self._special_start in text and self._special.search(text):
                pieces.append(self._by_reference(text))
                continue
            if text.isascii():
                pieces.append(b"".join(map(words, ascii_words(text, self._lowercase))))
                continue
            if _DROPPED_BLANKS.search(text):
                text = _DROPPED_BLANKS.sub("", text)
            pieces.append(b"".join(map(chunks, text.split())))
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) // 4, out=offsets[1:])
        return np.frombuffer(b"".join(pieces), np.uint32), offsets

    def _by_reference(self, text: str) -> bytes:
        return self._ensure_reference().encode_batch([text])[0].tobytes()

    def _ensure_reference(self) -> ReferenceEngine:
        if self._reference is None:
            self._reference = ReferenceEngine(self._recipe)
        return self._reference

    def decode(self, ids: Sequence[int]) -> str:
        return self._ensure_reference().decode(ids)
