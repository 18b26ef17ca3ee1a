"""Perplexity and bits per byte of documents, from text files or from a `.bin/.idx` pair.

A document is scored from its first token, in disjoint windows of the model's positions. The first token is predicted from the
token that the tokenizer puts before every text, or else from the end-of-document token; neither of them is scored. Bits per byte
count the bytes of the text, so that models with different tokenizers can be compared.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.data.indexed import IndexedDataset
from holdfast.data.samples.splits import SPLITS, split_ranges
from holdfast.data.sources.texts import Texts
from holdfast.evaluation.scoring import Pair, score, windows
from holdfast.generation.loading import LoadedModel
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import progress
from holdfast.tokenizers import Tokenizer

# Windows that are sorted by length and batched together.
GATHERED_WINDOWS = 1024


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts some documents."""

    documents: int
    tokens: int
    bytes: int
    loss: float
    """Mean negative log-probability of a token, in nats."""
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Document:
    tokens: Sequence[int]
    bytes: int


def measure(loaded: LoadedModel, documents: Iterator[Document], total: int | None = None) -> Perplexity:
    """The perplexity of all documents together; empty documents are left out."""
    begin = begin_token(loaded.tokenizer)
    prefix = (loaded.tokenizer.eod or 0) if begin is None else begin
    counts = {"documents": 0, "tokens": 0, "bytes": 0}
    nats = 0.0
    with progress("scoring", total, "documents") as bar:

        def pairs() -> Iterator[Pair]:
            for document in documents:
                if document.tokens:
                    for key, amount in zip(counts, (1, len(document.tokens), document.bytes), strict=True):
                        counts[key] += amount
                    yield from windows(document.tokens, prefix, loaded.max_positions)
                bar.advance()

        waiting = pairs()
        while gathered := list(itertools.islice(waiting, GATHERED_WINDOWS)):
            nats -= sum(result.logprob for result in score(loaded, gathered))
    if not counts["tokens"] or not counts["bytes"]:
        raise HoldfastError("the data holds no tokens to score")
    loss = nats / counts["tokens"]
    bits = nats / math.log(2) / counts["bytes"]
    return Perplexity(**counts, loss=loss, perplexity=math.exp(min(loss, 700.0)), bits_per_byte=bits)


def begin_token(tokenizer: Tokenizer) -> int | None:
    """The token that the tokenizer puts before every text, if it does."""
    added = tokenizer.encode("")
    return added[0] if added and added[0] == tokenizer.recipe.bos else None


def text_documents(loaded: LoadedModel, files: Sequence[str | Path], key: str = "text") -> Iterator[Document]:
    """The documents of text files, in every format that `preprocess` reads, without special tokens around them."""
    plain = Tokenizer(replace(loaded.tokenizer.recipe, special_tokens=False))
    for text in Texts(files, (key,)):
        yield Document(plain.encode(text), len(text.encode()))


def dataset_documents(loaded: LoadedModel, prefix: str | Path, split: str | None, part: str) -> Iterator[Document]:
    """The documents of a `.bin/.idx` pair, or of one part of its split, without the special tokens around them."""
    data = IndexedDataset(prefix)
    chosen: range | None = range(data.document_count)
    if split is not None:
        chosen = split_ranges(split, data.document_count)[SPLITS.index(part)]
    if not chosen:
        raise UsageError(f"split {split} leaves no documents for the part '{part}' of {prefix}")
    tokenizer = loaded.tokenizer
    begin = begin_token(tokenizer)
    for index in chosen:
        tokens = [token for sequence in data.document(index) for token in sequence.tolist()]
        if tokens and tokens[-1] == tokenizer.eod:
            tokens.pop()
        if tokens and tokens[0] == begin:
            tokens = tokens[1:]
        if tokens and max(tokens) >= tokenizer.vocab_size:
            raise HoldfastError(
                f"{prefix}: document {index} holds token {max(tokens)}, but the model's tokenizer has only "
                f"{tokenizer.vocab_size:,} tokens: the data was made with another tokenizer"
            )
        yield Document(tokens, len(tokenizer.decode(tokens).encode()))
