"""Texts that tokenizers and readers stumble over, and what Megatron makes of them, worked out line by line."""

import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]


def gpt2_folder() -> Path | None:
    """The real GPT-2 files, where this machine has them."""
    for folder in (
        os.environ.get("HOLDFAST_TEST_DATA"),
        REPOSITORY.parent / "shared/data",
        REPOSITORY.parents[1] / "shared/data",
    ):
        if folder and Path(folder, "gpt2/vocab.json").is_file():
            return Path(folder, "gpt2")
    return None


def every_code_point(limit: int = 0x30000, per_text: int = 2000) -> list[str]:
    """Each code point in the middle of words, after a blank and twice in a row."""
    points = [point for point in range(limit) if not 0xD800 <= point < 0xE000]
    contexts = [f"a{chr(point)}b {chr(point)}{chr(point)}c" for point in points]
    return [" ".join(contexts[i : i + per_text]) for i in range(0, len(contexts), per_text)]


NASTY: list[Any] = [
    "plain words, 1234 numbers; and don't we'll CAN'T",
    "",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤦🏽‍♂️ e\u0301 \u200d\u200d",
    "漢字かな交じり文。한국어 텍스트 ไทย العربية",
    "x" * 100_000,
    " " * 10_000 + "end",
    "\n" * 5_000 + "\t" * 500 + "-" * 5_000,
    "NUL\x00inside\x00\x00",
    "before<|endoftext|>after <|endoftext|><|endoftext|>",
    "<|endoftext|>",
    ["first sentence.", "", "second one.", "\n"],
    [],
    ["", ""],
    "\u00a0\u2003\u3000 odd blanks \u2028\u2029\x85 ends",
    "\ufeffmark inside",
    'quotes " and \\ back\\slashes / and \u007f',
]


def nasty_lines() -> list[bytes]:
    lines = [
        json.dumps({"text": value, "other": 1}, ensure_ascii=number % 2 == 0).encode()
        for number, value in enumerate(NASTY)
    ]
    lines += [
        b'{"text": "first", "text": "the last of two equal keys wins"}',
        b'{"id": NaN, "text": "json takes NaN", "huge": 123456789012345678901234567890}',
        b'  {"text" : "blanks around"}  \r',
        b'{"meta": {"text": "not this one"}, "text": "this one"}',
    ]
    return lines


def megatron_documents(
    lines: Iterable[bytes], key: str, tokenizer: Tokenizer, append_eod: bool
) -> list[list[list[int]]]:
    """Megatron's rules, one document at a time: json.loads, one encode per text, no empty sequence, EOD on the last."""
    documents = []
    for line in lines:
        value = json.loads(line)[key]
        sentences = [ids for text in (value if isinstance(value, list) else [value]) if (ids := tokenizer.encode(text))]
        if sentences and append_eod:
            assert tokenizer.eod is not None
            sentences[-1] = [*sentences[-1], tokenizer.eod]
        documents.append(sentences)
    return documents


def dataset_bytes(
    documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<u2", code: int = 8
) -> tuple[bytes, bytes]:
    """The pair of files, straight from the format's definition."""
    sequences = [sequence for document in documents for sequence in document]
    content = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    lengths = [len(sequence) for sequence in sequences]
    pointers = [np.dtype(dtype).itemsize * sum(lengths[:i]) for i in range(len(lengths))]
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(ends))
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes() + np.array(ends, "<i8").tobytes()
    return content, index


def megatron_bytes(
    documents: Sequence[Sequence[Sequence[int]]], folder: Path, dtype: Any = np.uint16
) -> tuple[bytes, bytes] | None:
    """The pair of files as Megatron's own builder writes them; None where megatron-core is not installed."""
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError:
        return None
    builder = IndexedDatasetBuilder(str(folder / "oracle.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(
            [token for sequence in document for token in sequence], [len(sequence) for sequence in document]
        )
    builder.finalize(str(folder / "oracle.idx"))
    return (folder / "oracle.bin").read_bytes(), (folder / "oracle.idx").read_bytes()


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def prose(count: int, seed: int = 0) -> list[bytes]:
    """Many lines of made-up words, all different, as JSON."""
    random = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfw ,.\n"))
    return [
        json.dumps({"text": "".join(random.choice(letters, random.integers(1, 2000))), "id": number}).encode()
        for number in range(count)
    ]
