"""What a .bin/.idx pair holds and whether it is sound."""

from pathlib import Path
from typing import Any

import numpy as np

from holdfast.data.indexed import IndexedDataset, pair_paths
from holdfast.inspection import DocumentSamples, PathDescription
from holdfast.system.errors import HoldfastError

# Token ids are counted in at most this many tokens, spread evenly over the data; no vocabulary has larger ids.
COUNTED_TOKENS = 1 << 26
LARGEST_COUNTED_ID = 1 << 24
COUNTED_STRETCH = 1 << 20
SHOWN_CHARACTERS = 200


def recognises(path: Path) -> bool:
    return pair_paths(path)[1].is_file()


def describe(path: Path, samples: DocumentSamples) -> PathDescription:
    dataset = IndexedDataset(path)
    problems = []
    try:
        dataset.check()
    except HoldfastError as error:
        problems.append(str(error))
    facts: dict[str, Any] = {
        "prefix": dataset.prefix,
        "dtype": str(dataset.dtype),
        "sequences": len(dataset),
        "documents": dataset.document_count,
        "empty_documents": int((np.diff(dataset.document_indices) == 0).sum()),
        "tokens": int(dataset.sequence_lengths.sum(dtype=np.int64)),
        "bin_bytes": dataset.bin_path.stat().st_size,
        "modes": dataset.multimodal,
        **_lengths(dataset),
        **_tokens(dataset),
    }
    if facts["tokens"] * dataset.dtype.itemsize != facts["bin_bytes"] and not problems:
        described = facts["tokens"] * dataset.dtype.itemsize
        problems.append(f"{dataset.bin_path} holds {facts['bin_bytes']:,} bytes, but its index describes {described:,}")
    if samples.tokenizer and not problems:
        facts |= _texts(dataset, samples, facts, problems)
    return PathDescription(facts, _lines(facts), problems)


def _lengths(dataset: IndexedDataset) -> dict[str, Any]:
    lengths = dataset.sequence_lengths
    if not len(lengths):
        return {"shortest": 0, "longest": 0, "length_histogram": {}}
    buckets = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    histogram = {f"up to {2**power:,}": int(count) for power, count in enumerate(buckets) if count}
    return {"shortest": int(lengths.min()), "longest": int(lengths.max()), "length_histogram": histogram}


def _tokens(dataset: IndexedDataset) -> dict[str, Any]:
    tokens = dataset.tokens
    if tokens.dtype.kind not in "iu" or not len(tokens):
        return {"largest_id": None, "distinct_ids": 0, "frequent_ids": {}}
    stretches = max(1, min(COUNTED_TOKENS, len(tokens)) // COUNTED_STRETCH)
    counts, largest = np.zeros(0, np.int64), 0
    for start in np.linspace(0, max(0, len(tokens) - COUNTED_STRETCH), stretches).astype(int):
        stretch = np.maximum(tokens[start : start + COUNTED_STRETCH], 0)
        largest = max(largest, int(stretch.max()))
        found = np.bincount(stretch[stretch <= LARGEST_COUNTED_ID])
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    frequent = np.argsort(counts)[::-1][:10]
    share = {int(number): round(float(counts[number] / counts.sum()), 6) for number in frequent if counts[number]}
    return {"largest_id": largest, "distinct_ids": int((counts > 0).sum()), "frequent_ids": share}


def _texts(
    dataset: IndexedDataset, samples: DocumentSamples, facts: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    assert samples.tokenizer is not None
    tokenizer = samples.tokenizer()
    if facts["largest_id"] is not None and facts["largest_id"] >= tokenizer.vocab_size:
        problems.append(
            f"token {facts['largest_id']} is not in this tokenizer's vocabulary of {tokenizer.vocab_size:,}: "
            "the dataset was made with another tokenizer"
        )
        return {}
    shown = min(samples.documents, dataset.document_count)
    texts = [[tokenizer.decode(sequence.tolist()) for sequence in dataset.document(number)] for number in range(shown)]
    names = {number: tokenizer.decode([number]) for number in facts["frequent_ids"]}
    return {"texts": texts, "frequent_texts": names}


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"{facts['documents']:,} documents ({facts['empty_documents']:,} empty), {facts['sequences']:,} sequences, "
        f"{facts['tokens']:,} tokens of type {facts['dtype']}, {facts['bin_bytes']:,} bytes",
        f"sequences have {facts['shortest']:,} to {facts['longest']:,} tokens",
    ]
    lines += [f"  {bucket:>20} tokens: {count:,}" for bucket, count in facts["length_histogram"].items()]
    names = facts.get("frequent_texts", {})
    frequent = [
        f"{number}{f' {names[number]!r}' if number in names else ''} {share:.1%}"
        for number, share in facts["frequent_ids"].items()
    ]
    lines.append(f"{facts['distinct_ids']:,} different tokens, the most frequent: {', '.join(frequent)}")
    for number, sequences in enumerate(facts.get("texts", [])):
        text = " | ".join(sequences)
        lines.append(f"document {number}: {text[:SHOWN_CHARACTERS]!r}{'...' if len(text) > SHOWN_CHARACTERS else ''}")
    return lines
