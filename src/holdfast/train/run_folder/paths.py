"""Makes the paths of a configuration absolute: a run continues from any working directory, a job starts in another one."""

import os
from dataclasses import replace
from pathlib import Path

from holdfast.config import Config
from holdfast.data.samples.blend import split_blend
from holdfast.system.errors import UsageError


def with_absolute_paths(config: Config) -> Config:
    """The configuration with absolute paths. Catalog names and URLs stay as they are."""
    train, data = config.train, config.data
    words = tuple(split_blend(data.data_path))
    return replace(
        config,
        data=replace(
            data,
            data_path=tuple(part if is_weight(part) else absolute(part) for part in words),
            data_cache_path=data.data_cache_path and absolute(data.data_cache_path),
            vocab_file=data.vocab_file and existing(data.vocab_file),
            merge_file=data.merge_file and existing(data.merge_file),
            tokenizer_model=data.tokenizer_model and existing(data.tokenizer_model),
        ),
        train=replace(
            train,
            save=train.save and absolute(train.save),
            load=train.load and absolute(train.load),
            eval_prompts=train.eval_prompts and absolute(train.eval_prompts),
        ),
    )


def absolute(path: str) -> str:
    """The absolute path, with `~` and environment variables expanded."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    if "$" in expanded:
        raise UsageError(f"{path}: an environment variable in this path is not set; export it first")
    return os.path.abspath(expanded)


def existing(name: str) -> str:
    """An existing file as absolute path; a catalog name or URL as it is."""
    return absolute(name) if "$" in name or Path(name).expanduser().exists() else name


def is_weight(text: str) -> bool:
    """Whether a word of data_path is the weight of a blend."""
    try:
        float(text)
    except ValueError:
        return False
    return True
