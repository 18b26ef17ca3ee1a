"""What identifies a run: the model, the content of the data, the digest of the tokenizer, the seed.

A run folder depends on no outside file except its data:

    RUN/tokenizer/     the tokenizer's files, as they were when the run started (tokenizers/folder.py)
    RUN/data.json      the datasets: absolute prefix, weight, fingerprint (data/fingerprint.py)

So a run continues from any directory, after its folder or its data moved, and after the original tokenizer files changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import abspath
from pathlib import Path
from typing import Any

import orjson

from holdfast.config import Config, DataConfig, read_config
from holdfast.system.atomic_files import publish_bytes, publish_folder
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log
from holdfast.tokenizers.folder import (
    FILE_KEYS,
    KEYS,
    RECIPE_FILE,
    describe,
    folder_contents,
    read_folder,
    recipe_of,
)
from holdfast.tokenizers.recipe import Recipe
from holdfast.train.run_folder.paths import existing

# Keys that decide what is computed. Others (length, layout, reporting) may differ between two starts of one run.
IDENTITY: Mapping[str, tuple[str, ...] | None] = {
    "model": None,  # all of it
    "data": ("split", "seq_length", "packing"),
    "train": ("seed",),
}
TOKENIZER, DATA = "tokenizer", "data.json"


def read_run_config(path: Path | str) -> Config:
    """The configuration in a file. A run's config.toml refers to the folder that it is in, even after the folder moved."""
    config, folder = read_config(path), Path(path).absolute().parent
    if Path(path).name != "config.toml":
        return config
    save = config.train.save
    is_run = any((folder / name).exists() for name in (DATA, "checkpoints", "events.jsonl"))
    if is_run and save is not None and Path(save).resolve() != folder.resolve():
        log(f"{path} names the run folder {save}; the run is now in {folder}")
        config = replace(config, train=replace(config.train, save=str(folder)))
    carried = read_folder(folder / TOKENIZER)
    return config if carried is None else _with_tokenizer(config, carried.names)


def adopt_tokenizer(config: Config) -> Config:
    """Replaces the tokenizer files by the run's own copy, if the configuration names the files that the copy was made from.

    After a start that made no step nothing depends on the copy: the next start reads the files again.
    """
    folder = Path(config.train.save) if config.train.save else None
    if folder is None or not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return config
    carried = read_folder(folder / TOKENIZER)
    if carried is None:
        return config
    names, sources = tokenizer_names(config.data), carried.sources
    if names.keys() != sources.keys() or any(sources[key] not in (name, abspath(name)) for key, name in names.items()):
        return config
    try:
        changed = recipe_of(sources).digest != carried.recipe.digest
    except HoldfastError:
        changed = True
    if changed:
        file = next(sources[key] for key in FILE_KEYS if key in sources)
        log(f"{file} has changed since the run started; the run uses its own copy in {carried.path}")
    return _with_tokenizer(config, carried.names)


def tokenizer_names(data: DataConfig) -> dict[str, str]:
    """The tokenizer keys that are set; empty if none of them names a file."""
    names = {key: value for key in KEYS if (value := getattr(data, key))}
    return names if any(key in names for key in FILE_KEYS) else {}


def differences(folder: Path, old: Config, new: Config) -> list[str]:
    """The differences that make `new` another run than the one in the folder, whose config.toml is `old`."""
    found = []
    for section, keys in IDENTITY.items():
        before, after = getattr(old, section), getattr(new, section)
        for key in keys or vars(before):
            if getattr(before, key) != getattr(after, key):
                found.append(f"{key} was {getattr(before, key)!r} and is {getattr(after, key)!r}")
    before, after = old.optimizer.optimizer, new.optimizer.optimizer
    if (before == "muon") != (after == "muon"):  # Adam and LAMB have the same state
        found.append(f"optimizer was {before!r} and is {after!r}, whose state is another one")
    return [*found, *_other_data(folder, old, new), *_other_tokenizer(folder, old, new)]


def carry_identity(folder: Path, config: Config) -> Config:
    """Writes the tokenizer and the description of the data into the run folder; the configuration that refers to the copies."""
    datasets = describe_data(config.data.data_path)
    record = {"format": "holdfast run data", "datasets": datasets}
    publish_bytes(folder / DATA, orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
    names = tokenizer_names(config.data)
    if not names:
        return config
    digest, target = recipe_of(names).digest, folder / TOKENIZER
    if not _holds(target, digest):
        sources = {key: existing(name) if key in FILE_KEYS else name for key, name in names.items()}
        _publish(target, folder_contents(names, sources), digest)
    carried = read_folder(target)
    assert carried is not None
    return _with_tokenizer(config, carried.names)


def describe_data(data_path: Sequence[str]) -> list[dict[str, Any]]:
    """The datasets as RUN/data.json records them."""
    from holdfast.data.fingerprint import fingerprint
    from holdfast.data.samples.blend import parse_data_path

    parsed = parse_data_path(data_path)
    weights = parsed.weights or (None,) * len(parsed.prefixes)
    return [
        {"prefix": str(Path(prefix).absolute()), "weight": weight, "fingerprint": fingerprint(prefix)}
        for prefix, weight in zip(parsed.prefixes, weights, strict=True)
    ]


def _other_data(folder: Path, old: Config, new: Config) -> list[str]:
    before, after = old.data.data_path, new.data.data_path
    try:
        recorded = orjson.loads((folder / DATA).read_bytes())["datasets"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        if before == after:  # a run of an older version: there is no record to compare with
            return []
        try:
            recorded = describe_data(before)
        except HoldfastError:
            return [f"data_path was {before!r} and is {after!r}"]
    found = describe_data(after)

    def content(datasets: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
        return [(dataset["weight"], dataset["fingerprint"]) for dataset in datasets]

    if content(recorded) == content(found):
        return []
    if [dataset["prefix"] for dataset in recorded] == [dataset["prefix"] for dataset in found]:
        return [f"the data in {' '.join(after)} was changed, or has other weights, since the run started"]
    return [f"data_path was {before!r} and is {after!r}, which holds other data"]


def _other_tokenizer(folder: Path, old: Config, new: Config) -> list[str]:
    before, after = tokenizer_names(old.data), tokenizer_names(new.data)
    carried = read_folder(folder / TOKENIZER)
    if carried is not None:
        recipe: Recipe | None = carried.recipe
    elif before == after:
        return []
    else:
        try:
            recipe = recipe_of(before) if before else None
        except HoldfastError:
            recipe = None  # the files are gone: compare names only
    found = recipe_of(after) if after else None
    if recipe is not None and found is not None and recipe.digest == found.digest:
        return []
    was = describe(recipe) if recipe else before or "none"
    return [f"the tokenizer was {was} and is {describe(found) if found else 'none'}"]


def _holds(folder: Path, digest: str) -> bool:
    try:
        carried = read_folder(folder)
    except HoldfastError:
        return False
    return carried is not None and carried.recipe.digest == digest


def _publish(folder: Path, contents: Mapping[str, bytes], digest: str) -> None:
    """Publishes the tokenizer folder; several nodes may do so at once. A folder with another tokenizer is left from a start that
    made no step."""
    if not folder.exists():
        try:
            with publish_folder(folder) as temporary:
                for name, content in contents.items():
                    (temporary / name).write_bytes(content)
            return
        except (HoldfastError, OSError):
            if not folder.exists():
                raise
    if not _holds(folder, digest):
        (folder / RECIPE_FILE).unlink(missing_ok=True)  # its presence marks a complete folder: it is written last again
        for name, content in contents.items():
            publish_bytes(folder / name, content)


def _with_tokenizer(config: Config, names: Mapping[str, str]) -> Config:
    values: dict[str, Any] = {**dict.fromkeys(FILE_KEYS), **names}
    return replace(config, data=replace(config.data, **values))
