"""tiktoken's vocabularies: OpenAI's .tiktoken files and Megatron's JSON list. Neither names its pattern; both are known by form.

A .tiktoken file is recognised by its name (cl100k_base.tiktoken, ...). Megatron's JSON (entries with rank and token_bytes) puts
1,000 special tokens in front and splits with its pattern v2; its end of a document is </s>.
"""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.system.errors import HoldfastError

_OTHER = r"[^\s\p{L}\p{N}]"
_LEAD = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TAIL = rf" ?{_OTHER}+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}++| ?\p{{N}}++| ?{_OTHER}++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_LEAD}?+\p{{L}}++|\p{{N}}{{1,3}}+| ?{_OTHER}++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_PATTERN = rf"{_LEAD}?{_UPPER}*{_LOWER}+{_ENDINGS}|{_LEAD}?{_UPPER}+{_LOWER}*{_ENDINGS}|\p{{N}}{{1,3}}|{_TAIL}"
MEGATRON_PATTERN = rf"{_LEAD}?{_UPPER}*{_LOWER}+|{_LEAD}?{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL}"
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_SPECIAL_COUNT, MEGATRON_VOCABULARY = 1000, 2**17

_NAMED = {
    "cl100k_base": (
        CL100K_PATTERN,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "r50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "p50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
}


@dataclass(frozen=True)
class TiktokenVocabulary:
    name: str
    pattern: str
    ranks: dict[bytes, int]
    special: dict[str, int]
    eod: int

    @property
    def vocab_size(self) -> int:
        return max(max(self.ranks.values()), max(self.special.values())) + 1


def read_tiktoken(path: str, content: bytes) -> TiktokenVocabulary:
    name = Path(path).name
    try:
        if name.endswith(".json"):
            return _megatron(name, orjson.loads(content))
        stem = next((known for known in _NAMED if known in name), None)
        if stem is None:
            raise HoldfastError(
                f"{path}: a .tiktoken file does not say how it splits text; keep one of the names {', '.join(_NAMED)} in its name"
            )
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        if not ranks:
            raise ValueError("it holds no token")
        pattern, special = _NAMED[stem]
        return TiktokenVocabulary(stem, pattern, ranks, special, special["<|endoftext|>"])
    except (ValueError, KeyError, TypeError) as error:
        raise HoldfastError(f"{path} is not a tiktoken vocabulary: {error}") from error


def _megatron(name: str, entries: list[dict[str, Any]]) -> TiktokenVocabulary:
    entries = entries[: MEGATRON_VOCABULARY - MEGATRON_SPECIAL_COUNT]
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + MEGATRON_SPECIAL_COUNT for entry in entries}
    fillers = (f"<SPECIAL_{number}>" for number in range(len(MEGATRON_SPECIAL), MEGATRON_SPECIAL_COUNT))
    special = {token: number for number, token in enumerate([*MEGATRON_SPECIAL, *fillers])}
    return TiktokenVocabulary(name, MEGATRON_PATTERN, ranks, special, special["</s>"])
