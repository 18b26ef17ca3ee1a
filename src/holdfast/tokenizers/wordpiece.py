"""BERT's WordPiece, fast: every blank-delimited chunk of text is looked up in a table of chunks that were seen before.

The table holds the ids of a chunk as bytes, so that a text is one split, one map and one join, without a Python object per
token. BERT's normalizer treats characters one by one and its pre-tokenizer cuts at blanks, so chunks are independent of each
other. A new chunk is worked out by the rules: ASCII here, other characters with the reference's own normalizer and
pre-tokenizer. A text that holds a special token goes to the reference engine as a whole.
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
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_ASCII_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
REMEMBERED_CHARACTERS, REMEMBERED_CHUNKS = 40, 1 << 18


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


class Chunks(dict[str, bytes]):
    """Chunk to the bytes of its ids (uint32); a chunk that is not there is worked out, and kept while there is room."""

    def __init__(self, definition: dict[str, Any]) -> None:
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        model = definition["model"]
        self._vocabulary: dict[str, int] = model["vocab"]
        self._unknown = self._vocabulary[model["unk_token"]]
        self._prefix, self._longest = model["continuing_subword_prefix"], model["max_input_chars_per_word"]
        self._lowercase = bool(definition["normalizer"]["lowercase"])
        self._normalize = BertNormalizer(lowercase=self._lowercase).normalize_str
        self._cut = BertPreTokenizer().pre_tokenize_str
        self._words: dict[str, list[int]] = {}

    def __missing__(self, chunk: str) -> bytes:
        if chunk.isascii():
            clean = _CONTROL.sub("", chunk)
            words = _ASCII_WORDS.findall(clean.lower() if self._lowercase else clean)
        else:
            words = [word for word, _ in self._cut(self._normalize(chunk))]
        ids = array("I")
        for word in words:
            ids.extend(self._word(word))
        found = ids.tobytes()
        if len(chunk) <= REMEMBERED_CHARACTERS:
            if len(self) >= REMEMBERED_CHUNKS:
                self.clear()
            self[chunk] = found
        return found

    def _word(self, word: str) -> list[int]:
        known = self._words.get(word)
        if known is None:
            known = self._pieces(word)
            if len(word) <= REMEMBERED_CHARACTERS:
                if len(self._words) >= REMEMBERED_CHUNKS:
                    self._words.clear()
                self._words[word] = known
        return known

    def _pieces(self, word: str) -> list[int]:
        """The longest piece that fits, again and again; a word that cannot be covered is one unknown token."""
        if len(word) > self._longest:
            return [self._unknown]
        ids: list[int] = []
        start, length = 0, len(word)
        while start < length:
            for end in range(length, start, -1):
                piece = word[start:end] if start == 0 else self._prefix + word[start:end]
                number = self._vocabulary.get(piece)
                if number is not None:
                    break
            else:
                return [self._unknown]
            ids.append(number)
            start = end
        return ids


class FastBertEngine:
    def __init__(self, recipe: Recipe) -> None:
        import tokenizers

        definition = orjson.loads(recipe.definition)
        if recipe.special_tokens and definition.get("post_processor"):
            raise ValueError("texts with special tokens around them are the reference engine's")
        self.name = f"word table over tokenizers {tokenizers.__version__}"
        self._chunks = Chunks(definition)
        special = [token["content"] for token in definition.get("added_tokens") or []]
        self._special_start = special[0][0] if special and len({token[0] for token in special}) == 1 else ""
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._recipe = recipe
        self._reference: ReferenceEngine | None = None

    def encode_batch(self, texts: Sequence[str]) -> Flat:
        table = self._chunks.__getitem__
        pieces = []
        for text in texts:
            if self._special and self._special_start in text and self._special.search(text):
                pieces.append(self._by_reference(text))
                continue
            if _DROPPED_BLANKS.search(text):
                text = _DROPPED_BLANKS.sub("", text)
            pieces.append(b"".join(map(table, text.split())))
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
