"""Text to a Megatron dataset: JSON lines in, PREFIX_KEY_document.bin and .idx out, complete or not at all."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.data.encode import encode_documents
from holdfast.data.indexed import IndexPart, pair_paths, publish_pairs, write_index
from holdfast.data.sources.jsonl import parse_lines
from holdfast.errors import HoldfastError
from holdfast.publish import explain_os_error, temporary_beside
from holdfast.tokenizers import build_tokenizer

BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class Summary:
    """What a run of preprocess made."""

    outputs: tuple[str, ...]
    documents: int
    tokens: int
    seconds: float


def preprocess(
    input: Sequence[str | Path] | str | Path,
    output_prefix: str | Path,
    *,
    tokenizer_type: str = "GPT2BPETokenizer",
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
) -> Summary:
    """Tokenizes JSON lines into one .bin/.idx pair per key."""
    from holdfast.data.indexed import dtype_for_vocabulary

    started = time.monotonic()
    paths = [Path(input)] if isinstance(input, (str, Path)) else [Path(path) for path in input]
    tokenizer = build_tokenizer(tokenizer_type, vocab_file, merge_file, tokenizer_model)
    dtype = np.dtype(dtype_for_vocabulary(tokenizer.vocab_size))
    eod = tokenizer.eod if append_eod else None
    prefixes = [f"{output_prefix}_{key}_document" for key in json_keys]
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    bins = [temporary_beside(pair_paths(prefix)[0]) for prefix in prefixes]
    idxs = [temporary_beside(pair_paths(prefix)[1]) for prefix in prefixes]
    parts: list[list[IndexPart]] = [[] for _ in json_keys]
    try:
        files = [path.open("wb") for path in bins]
        for path in paths:
            line = 0
            with path.open("rb") as source:
                while lines := source.readlines(BATCH_BYTES):
                    batch = parse_lines(b"".join(lines), json_keys)
                    if batch.bad:
                        bad = batch.bad[0]
                        raise HoldfastError(f"{path}:{line + bad.line + 1}: bad line: {bad.reason}")
                    line += batch.lines
                    for values, file, index in zip(batch.values, files, parts, strict=True):
                        encoded = encode_documents(values, tokenizer, eod, dtype)
                        file.write(encoded.tokens.tobytes())
                        index.append(IndexPart(encoded.lengths, encoded.documents))
        for file in files:
            file.close()
        if not any(len(part.documents) for part in parts[0]):
            raise HoldfastError(f"{', '.join(map(str, paths))}: no documents found; is the input empty?")
        for idx, index in zip(idxs, parts, strict=True):
            write_index(idx, dtype, index)
        publish_pairs(list(zip(bins, idxs, prefixes, strict=True)))
    except OSError as error:
        raise explain_os_error(error, pair_paths(prefixes[0])[0]) from error
    finally:
        for leftover in (*bins, *idxs):
            leftover.unlink(missing_ok=True)
    documents = sum(len(part.documents) for part in parts[0])
    tokens = sum(int(part.lengths.sum()) for index in parts for part in index)
    return Summary(tuple(prefixes), documents, tokens, time.monotonic() - started)
