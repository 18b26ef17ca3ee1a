"""The files that can be fetched by name: their URLs, sizes and checksums.

A checksum is listed only if the owner of the original published it; the others are recorded at the first download.
"""

import difflib
import os
import urllib.parse
from dataclasses import dataclass, field

from holdfast.system.errors import UsageError

_BUCKET = "https://s3.amazonaws.com/models.huggingface.co/bert"
_HUB = "https://huggingface.co"
_NGC = "https://api.ngc.nvidia.com/v2/models/nvidia"


@dataclass(frozen=True)
class FileSpec:
    """A file to fetch. Its URL identifies it in the cache; mirrors are tried in order when the URL fails."""

    url: str
    mirrors: tuple[str, ...] = ()
    name: str | None = None
    """The name in the cache; None takes the server's (Content-Disposition) or the URL's."""
    size: int | None = None
    sha256: str | None = None
    changes: bool = False
    """The server replaces the file now and then, so a later download may differ from the first."""


@dataclass(frozen=True)
class CatalogEntry:
    """A name in the catalog: what it is, and its files by role (`vocab`, `merges`, ...)."""

    summary: str
    files: dict[str, FileSpec] = field(default_factory=dict)


def _mirrored(name: str, repository: str, file: str, size: int, sha256: str) -> FileSpec:
    """A file of the bucket that the hub has too."""
    return FileSpec(f"{_BUCKET}/{name}", (f"{_HUB}/{repository}/resolve/main/{file}",), name, size, sha256)


def _release(model: str, version: str) -> dict[str, FileSpec]:
    return {"checkpoint": FileSpec(f"{_NGC}/{model}/versions/{version}/zip", name=f"{model}_{version}.zip")}


CATALOG: dict[str, CatalogEntry] = {
    "gpt2": CatalogEntry(
        "GPT-2's byte-level BPE: vocabulary and merges",
        {
            "vocab": _mirrored(
                *("gpt2-vocab.json", "openai-community/gpt2", "vocab.json", 1_042_301),
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            ),
            "merges": _mirrored(
                *("gpt2-merges.txt", "openai-community/gpt2", "merges.txt", 456_318),
                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
        },
    ),
    "bert-large-cased": CatalogEntry(
        "BERT's WordPiece vocabulary, case kept",
        {
            "vocab": _mirrored(
                *("bert-large-cased-vocab.txt", "google-bert/bert-large-cased", "vocab.txt", 213_450),
                "eeaa9875b23b04b4c54ef759d03db9d1ba1554838f8fb26c5d96fa551df93d02",
            )
        },
    ),
    "bert-large-uncased": CatalogEntry(
        "BERT's WordPiece vocabulary, lower case",
        {
            "vocab": _mirrored(
                *("bert-large-uncased-vocab.txt", "google-bert/bert-large-uncased", "vocab.txt", 231_508),
                "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            )
        },
    ),
    "oscar-1gb": CatalogEntry(
        "79 thousand web documents as JSON lines, xz-compressed",
        {
            "text": FileSpec(
                f"{_HUB}/bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz", name="oscar-1GB.jsonl.xz"
            )
        },
    ),
    "megatron-gpt2-345m": CatalogEntry(
        "NVIDIA's Megatron-LM GPT-2 checkpoint, 345M parameters", _release("megatron_lm_345m", "v0.0")
    ),
    "megatron-bert-345m-cased": CatalogEntry(
        "NVIDIA's Megatron-LM BERT checkpoint, 345M parameters, case kept", _release("megatron_bert_345m", "v0.1_cased")
    ),
    "megatron-bert-345m-uncased": CatalogEntry(
        "NVIDIA's Megatron-LM BERT checkpoint, 345M parameters, lower case",
        _release("megatron_bert_345m", "v0.1_uncased"),
    ),
    "enwiki": CatalogEntry(
        "the newest dump of English Wikipedia's articles, in many bz2 streams, so that all workers read it at once",
        {
            "text": FileSpec(
                "https://dumps.wikimedia.org/enwiki/latest/enwiki-latest-pages-articles-multistream.xml.bz2",
                name="enwiki-latest-pages-articles-multistream.xml.bz2",
                changes=True,
            )
        },
    ),
}


SCHEMES = ("http", "https", "file", "hf", "s3")


def is_url(text: str) -> bool:
    return "://" in text


def is_known(text: str) -> bool:
    return text.partition("/")[0] in CATALOG


def file_specs(text: str) -> dict[str, FileSpec]:
    """The files, by role, of a URL, a catalog name (`gpt2`) or one file of it (`gpt2/vocab`, `gpt2/gpt2-vocab.json`)."""
    if is_url(text):
        scheme = text.partition("://")[0].lower()
        if scheme not in SCHEMES:
            raise UsageError(f"cannot fetch {text}: the scheme '{scheme}' is none of {', '.join(SCHEMES)}")
        try:
            urllib.parse.urlsplit(text).hostname  # noqa: B018
            text.encode()
        except ValueError as error:
            raise UsageError(f"{text!r} is not a valid URL: {error}") from None
        # A URL that the catalog lists has a checksum and mirrors.
        listed = [spec for known in CATALOG.values() for spec in known.files.values() if spec.url == text]
        return {"file": listed[0] if listed else FileSpec(text)}
    name, _, part = text.partition("/")
    if name not in CATALOG:
        if os.path.exists(text):
            raise UsageError(f"{text} exists on this machine; to put a file into the cache, give its file:// URL")
        near = difflib.get_close_matches(text, CATALOG, n=3, cutoff=0.5)
        hint = f"; perhaps you meant {' or '.join(near)}" if near else ""
        raise UsageError(f"'{text}' is neither a URL nor a known name{hint} (holdfast fetch --list shows the names)")
    files = CATALOG[name].files
    if not part:
        return files
    for role, spec in files.items():
        if part in (role, spec.name):
            return {role: spec}
    raise UsageError(f"{name} has no file '{part}'; it has {', '.join(files)}")


def file_spec(text: str, role: str | None = None) -> FileSpec:
    """The one file that `text` names; `role` chooses where a name stands for several."""
    files = file_specs(text)
    if role in files:
        return files[role]
    if len(files) == 1:
        return next(iter(files.values()))
    raise UsageError(f"{text} stands for {len(files)} files: name one, {' or '.join(f'{text}/{one}' for one in files)}")
