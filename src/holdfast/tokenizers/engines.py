"""What computes a recipe: fastokens (fast), tokenizers (reference for every tokenizer.json), sentencepiece, tiktoken.

An engine turns a list of texts into one flat array of ids and the offsets between them, without a Python object per token.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.recipe import Recipe

FlatIds = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]


class Engine(Protocol):
    name: str

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        """The ids of all texts, one after the other, and where each begins (one more offset than texts)."""

    def decode(self, ids: Sequence[int]) -> str: ...


class FastEngine:
    """fastokens: byte-level BPE and WordPiece an order of magnitude faster, from the same tokenizer.json."""

    def __init__(self, recipe: Recipe) -> None:
        from importlib.metadata import version

        # The library sizes its thread pools when it first encodes; one process here is one worker and computes alone.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        from fastokens._native import Tokenizer

        self._native: Any = Tokenizer.from_json_str(recipe.definition)
        self.name = f"fastokens {version('fastokens')}"
        self._special = recipe.special_tokens

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        ids, offsets = self._native.encode_batch_flat(texts, add_special_tokens=self._special)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._native.decode(list(ids)))


class ReferenceEngine:
    """Hugging Face's tokenizers, which define what a tokenizer.json means."""

    def __init__(self, recipe: Recipe) -> None:
        import tokenizers

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.name = f"tokenizers {tokenizers.__version__}"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(recipe.definition)
        except Exception as error:
            together = (
                "; do --vocab-file and --merge-file belong together?" if "out of vocabulary" in str(error) else ""
            )
            raise HoldfastError(
                f"the {recipe.tokenizer_type}'s files do not make a tokenizer: {error}{together}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = recipe.special_tokens

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._special)
        return flatten([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceEngine:
    def __init__(self, recipe: Recipe) -> None:
        self._processor = load_sentencepiece(recipe.definition)
        self.name = "sentencepiece"

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        return flatten(self._processor.encode(list(texts), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(number) for number in ids]))


class TiktokenEngine:
    def __init__(self, recipe: Recipe) -> None:
        from holdfast.tokenizers.tiktoken_files import read_tiktoken

        tiktoken = _optional("tiktoken")
        vocabulary = read_tiktoken(recipe.definition, Path(recipe.definition).read_bytes())
        self.name = f"tiktoken {tiktoken.__version__}"
        self._encoding = tiktoken.Encoding(
            vocabulary.name,
            pat_str=vocabulary.pattern,
            mergeable_ranks=vocabulary.ranks,
            special_tokens=vocabulary.special,
        )

    def encode_batch(self, texts: Sequence[str]) -> FlatIds:
        return flatten([self._encoding.encode(text, allowed_special="all") for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(number) for number in ids]))


def flatten(lists: Sequence[Sequence[int]]) -> FlatIds:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.empty(int(offsets[-1]), np.uint32)
    for ids, begin in zip(lists, offsets.tolist(), strict=False):
        flat[begin : begin + len(ids)] = ids
    return flat, offsets


def load_sentencepiece(path: str) -> Any:
    sentencepiece = _optional("sentencepiece")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise HoldfastError(f"{path} is not a SentencePiece model: {str(error).splitlines()[0]}") from error


def _optional(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise HoldfastError(f"this tokenizer needs the package {package}: pip install {package}") from error
