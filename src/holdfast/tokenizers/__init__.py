"""Text to token ids and back, for every tokenizer that Megatron's users have: one way to build, one small interface.

A tokenizer is a Recipe (what it is: cheap, picklable, with a digest) and an engine (what computes it). The fast engine is used
where it is exact and the reference engine elsewhere; both give the same ids, or it is a bug that `preprocess` stops at.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.system.lazy_names import lazy_names
from holdfast.tokenizers.recipe import Recipe, read_recipe

if TYPE_CHECKING:
    from holdfast.tokenizers.tokenizer import Tokenizer

__all__ = ["Recipe", "Tokenizer", "build_tokenizer", "read_recipe"]
# Engines need numpy, reading a recipe does not.
__getattr__ = lazy_names(__name__, {"Tokenizer": "holdfast.tokenizers.tokenizer"})


def build_tokenizer(
    tokenizer_type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    *,
    engine: Literal["auto", "fast", "reference"] = "auto",
    special_tokens: bool = True,
) -> "Tokenizer":
    """A tokenizer by Megatron's type name and files.

    `special_tokens=False` leaves out what a tokenizer.json's post-processor adds around a text.
    """
    from holdfast.tokenizers.tokenizer import Tokenizer

    recipe = read_recipe(tokenizer_type, vocab_file, merge_file, tokenizer_model, special_tokens=special_tokens)
    return Tokenizer(recipe, engine)
