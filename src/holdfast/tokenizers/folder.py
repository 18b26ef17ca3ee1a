"""A folder that carries a tokenizer: copies of its files, and recipe.json, which names them and their digest.

A run and a converted checkpoint have one (RUN/tokenizer), so that they depend on no file outside of themselves. The invariant:
a folder that `read_folder` accepts gives the ids of the tokenizer that was stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.recipe import Recipe, read_recipe, source_files

FORMAT = "holdfast tokenizer"
RECIPE_FILE = "recipe.json"
FILE_KEYS = ("vocab_file", "merge_file", "tokenizer_model")
KEYS = ("tokenizer_type", *FILE_KEYS)


@dataclass(frozen=True)
class TokenizerFolder:
    """What a tokenizer folder holds."""

    path: Path
    names: dict[str, str]
    """tokenizer_type, vocab_file, merge_file, tokenizer_model as far as it has them; files as paths inside the folder."""
    sources: dict[str, str]
    """The same keys as they were given when the tokenizer was stored."""
    recipe: Recipe


def folder_contents(names: Mapping[str, str], sources: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """File name → content of the folder that carries the tokenizer of these names (KEYS, files as paths)."""
    recipe = recipe_of(names)
    files = source_files(recipe.tokenizer_type, *(names.get(key) for key in FILE_KEYS))
    contents: dict[str, bytes] = {}
    record: dict[str, Any] = {"format": FORMAT, "tokenizer_type": recipe.tokenizer_type}
    for key, (stored, path) in files.items():
        contents[stored] = path.read_bytes()
        if key in FILE_KEYS:
            record[key] = stored
    record |= {
        "digest_sha256": recipe.digest,
        "vocab_size": recipe.vocab_size,
        "sources": dict(sources or names),
    }
    return {**contents, RECIPE_FILE: orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n"}


def folder_names(contents: Mapping[str, bytes], folder: Path) -> dict[str, str]:
    """The names (KEYS) of the tokenizer of these contents, once they are in the folder."""
    return _names(orjson.loads(contents[RECIPE_FILE]), folder)


def read_folder(folder: Path) -> TokenizerFolder | None:
    """The tokenizer in a folder; None if it has no recipe.json of ours. Raises if its files are not those that were stored."""
    path = folder / RECIPE_FILE
    try:
        record = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except orjson.JSONDecodeError as error:
        raise HoldfastError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    names = _names(record, folder)
    recipe = recipe_of(names)
    if recipe.digest != record.get("digest_sha256"):
        raise HoldfastError(
            f"{folder} was changed: its files have the digest {recipe.digest[:12]}, but {RECIPE_FILE} says "
            f"{str(record.get('digest_sha256'))[:12]}; restore the files that the run was started with"
        )
    sources = record.get("sources")
    return TokenizerFolder(folder, names, dict(sources) if isinstance(sources, dict) else {}, recipe)


def _names(record: Mapping[str, Any], folder: Path) -> dict[str, str]:
    names = {"tokenizer_type": str(record.get("tokenizer_type"))}
    for key in FILE_KEYS:
        if isinstance(record.get(key), str):
            names[key] = str(folder / Path(record[key]).name)  # never a path out of the folder
    return names


def recipe_of(names: Mapping[str, str]) -> Recipe:
    return read_recipe(names["tokenizer_type"], *(names.get(key) for key in FILE_KEYS))


def describe(recipe: Recipe) -> str:
    """A tokenizer in a few words, for messages."""
    return f"{recipe.tokenizer_type} with {recipe.vocab_size:,} tokens (digest {recipe.digest[:12]})"
