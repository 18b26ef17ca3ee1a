"""`train --load` of a checkpoint in another format: converted once into the run folder, then loaded like any other.

RUN/loaded/NAME-HASH/      the converted checkpoint; it may be deleted once the run has a checkpoint of its own

The invariant: the hash is of the files as they are, so a source that was written again is converted again.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NoReturn

from holdfast.config import Config, ModelConfig
from holdfast.conversion.converting import convert
from holdfast.conversion.model import function_of
from holdfast.conversion.sources import kind_of, read_model
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log


def loads_other_format(config: Config) -> bool:
    """Whether --load names a Megatron or Hugging Face checkpoint that this run still has to start from.

    Refuses one that does not fit the configuration, before anything is written.
    """
    load, save = config.train.load, config.train.save
    if load is None or (save is not None and Path(save, "checkpoints", "latest").is_file()):
        return False
    source = Path(load)
    if kind_of(source) in (None, "holdfast"):
        return False
    if save is None or config.parallel.nnodes > 1:
        refuse(source)
    check_same_function(config.model, read_model(source).architecture.model_config(), source)
    return True


def refuse(source: Path) -> NoReturn:
    """Refuses a start that cannot convert: without a run folder, on several nodes, under torchrun."""
    target = f"{source.stem}-holdfast"
    raise HoldfastError(
        f"{source} is not a checkpoint of Holdfast; convert it first with "
        f"`holdfast convert {quote(str(source))} {quote(target)} --to holdfast`, then give --load {quote(target)} --finetune"
    )


def with_converted_load(config: Config) -> Config:
    """The configuration that loads the converted checkpoint: its weights, from step 0, with a fresh optimizer."""
    assert config.train.load is not None and config.train.save is not None
    source = Path(config.train.load)
    identity = repr((_files_of(source), config.model.vocab_size))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    target = Path(config.train.save, "loaded", f"{source.resolve().stem}-{digest}")
    if not target.exists():
        log(f"converting {source} into {target}")
        convert(source, target, "holdfast", true_vocab_size=config.model.vocab_size)
    return replace(config, train=replace(config.train, load=str(target), finetune=True))


def _files_of(source: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of every file of the source."""
    whole = source.resolve()
    paths = sorted(path for path in whole.rglob("*") if path.is_file()) if whole.is_dir() else [whole]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def check_same_function(ours: ModelConfig, theirs: ModelConfig, source: Path) -> None:
    """Refuses a configuration under which the loaded weights would compute something else."""
    here, there = function_of(ours), function_of(theirs)
    differing = [
        f"{name} is {there[name]!r} there and {here[name]!r} here"
        for name in here
        if name in there and None not in (there[name], here[name]) and there[name] != here[name]
    ]
    if differing:
        raise HoldfastError(f"{source} does not match the configuration: {'; '.join(differing)}")
