"""fastokens' tables of a vocabulary. They take a third of a second to build: who knows early that they will be needed has them
built beside other work, and `build` then only waits for the rest."""

import os
from functools import partial
from typing import Any

from holdfast.tokenizers.background import Background
from holdfast.tokenizers.recipe import Recipe

_begun: dict[str, Background[Any]] = {}


def are_needed(recipe: Recipe, engine: str) -> bool:
    """BERT's fast engine has none, nor has the reference."""
    return recipe.family == "json" and not recipe.looks_like_bert and engine != "reference"


def begin(definition: str) -> None:
    """Starts to build the tables of a tokenizer.json in a thread; the next `build` of the same takes them."""
    _begun[definition] = Background(partial(_build, definition))


def build(definition: str) -> Any:
    """The native tokenizer of a tokenizer.json; ValueError where fastokens does not know its parts."""
    begun = _begun.pop(definition, None)
    return begun.result() if begun is not None else _build(definition)


def _build(definition: str) -> Any:
    # The library sizes its pools when it first encodes; one process here is one worker and computes alone.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    from fastokens._native import Tokenizer

    return Tokenizer.from_json_str(definition)
