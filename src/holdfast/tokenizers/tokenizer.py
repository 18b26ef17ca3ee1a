"""The tokenizer that the rest of Holdfast sees."""

import functools
from collections.abc import Sequence
from typing import Literal

import orjson

from holdfast.tokenizers.engines import (
    Engine,
    FastEngine,
    FlatIds,
    ReferenceEngine,
    SentencePieceEngine,
    TiktokenEngine,
)
from holdfast.tokenizers.recipe import Recipe

EngineChoice = Literal["auto", "fast", "reference"]


class Tokenizer:
    """A recipe and the engine that computes it. Pickles as its recipe; unpickling builds the engine again."""

    def __init__(self, recipe: Recipe, engine: EngineChoice = "auto") -> None:
        self.recipe, self._choice = recipe, engine
        self.vocab_size, self.eod = recipe.vocab_size, recipe.eod
        self.cls, self.sep, self.mask, self.pad = recipe.cls, recipe.sep, recipe.mask, recipe.pad
        self._engine = choose_engine(recipe, engine)

    @property
    def engine(self) -> str:
        """Name and version of what computes the ids."""
        return self._engine.name

    @functools.cached_property
    def byte_tokens(self) -> frozenset[int]:
        """The tokens that stand for one byte of a character without a token (byte fallback); empty for other kinds.

        A decoder may write a run of them in another way once the run is longer.
        """
        if '"byte_fallback"' not in self.recipe.definition:
            return frozenset()
        vocabulary = orjson.loads(self.recipe.definition)["model"]["vocab"]
        names = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
        return frozenset(number for name, number in names if len(name) == 6 and name.startswith("<0x"))

    @property
    def is_reference(self) -> bool:
        """Whether the ids come from the library that defines them, and need no cross-check."""
        return isinstance(self._engine, (ReferenceEngine, SentencePieceEngine, TiktokenEngine))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        """The ids of all texts in one array, and the offsets between them."""
        return self._engine.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(ids)

    def fresh_copy(self) -> "Tokenizer":
        """The same tokenizer with an empty cache."""
        return Tokenizer(self.recipe, self._choice)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Recipe, EngineChoice]]:
        return type(self), (self.recipe, self._choice)


def choose_engine(recipe: Recipe, choice: EngineChoice) -> Engine:
    if recipe.family == "sentencepiece":
        return SentencePieceEngine(recipe)
    if recipe.family == "tiktoken":
        return TiktokenEngine(recipe)
    if choice == "reference":
        return ReferenceEngine(recipe)
    try:
        return fast_engine(recipe)
    except (ValueError, KeyError, ImportError):
        # It has no such model, normalizer or pre-tokenizer, or no wheel for this machine.
        if choice == "fast":
            raise
        return ReferenceEngine(recipe)


def fast_engine(recipe: Recipe) -> Engine:
    """The fast engine for a tokenizer.json; ValueError where there is none."""
    if recipe.looks_like_bert:
        from holdfast.tokenizers.wordpiece import FastBertEngine, is_bert

        if is_bert(orjson.loads(recipe.definition)):
            return FastBertEngine(recipe)
    return FastEngine(recipe)
