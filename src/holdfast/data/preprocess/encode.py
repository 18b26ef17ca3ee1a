"""Documents to tokens, lengths and document ends, by Megatron's rules.

A document is a text or a list of texts. A text without tokens makes no sequence; a document without tokens makes no sequence
and gets no end-of-document token, but keeps its entry in the document index.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.data.indexed import Array
from holdfast.tokenizers import Tokenizer

# From here on, copying stretch by stretch is quicker than with a mask.
LONG_STRETCH_TOKENS = 512


@dataclass(frozen=True)
class EncodedDocuments:
    texts: Sequence[str]
    ids: Array
    offsets: npt.NDArray[np.int64]
    """What the tokenizer gave for each text, before the rules: for cross-checks."""
    tokens: Array
    lengths: npt.NDArray[np.int32]
    documents: npt.NDArray[np.int64]
    """Number of sequences after each document, counted from the beginning of this batch."""


def encode_documents(
    documents: Sequence[str | list[str]], tokenizer: Tokenizer, eod: int | None, dtype: npt.DTypeLike
) -> EncodedDocuments:
    """Tokens of the documents in their order; with `eod`, that token after each document that has any."""
    texts, text_ends = _flatten(documents)
    ids, offsets = tokenizer.encode_batch(texts)
    counts = np.diff(offsets)
    ends = offsets[text_ends]
    filled = np.diff(ends, prepend=0) > 0
    tokens = ids.astype(dtype) if eod is None else _insert(ids, ends[filled], eod, dtype)
    if eod is not None:
        # The token goes to the last text of its document that has tokens.
        numbers = np.arange(1, len(counts) + 1) * (counts > 0)
        last = np.maximum.accumulate(numbers, axis=0) if len(numbers) else numbers
        counts[last[text_ends[filled] - 1] - 1] += 1
    sequences = counts > 0
    after = np.concatenate([[0], np.cumsum(sequences)])
    return EncodedDocuments(texts, ids, offsets, tokens, counts[sequences].astype(np.int32), after[text_ends])


def _flatten(documents: Sequence[str | list[str]]) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
    """All texts in a row, and the number of texts after each document."""
    if all(type(document) is str for document in documents):
        return documents, np.arange(1, len(documents) + 1)  # type: ignore[return-value]
    lists = [[document] if isinstance(document, str) else document for document in documents]
    return [text for document in lists for text in document], np.cumsum([len(document) for document in lists])


def _insert(ids: Array, positions: Array, token: int, dtype: npt.DTypeLike) -> Array:
    """`ids` with `token` before each of the ascending positions, in the dtype of the file."""
    spread = np.empty(len(ids) + len(positions), dtype)
    if len(ids) > LONG_STRETCH_TOKENS * len(positions):
        start = 0
        for shift, end in enumerate(positions.tolist()):
            spread[start + shift : end + shift] = ids[start:end]
            spread[end + shift] = token
            start = end
        spread[start + len(positions) :] = ids[start:]
        return spread
    keep = np.ones(len(spread), bool)
    keep[positions + np.arange(len(positions))] = False
    spread[keep] = ids
    spread[~keep] = token
    return spread
