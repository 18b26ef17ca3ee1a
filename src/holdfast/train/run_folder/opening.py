"""Opens the run folder: claims it, refuses a folder that holds another run or is in use, writes config.toml."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.config import Config, config_to_toml, read_config
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.system.atomic_files import publish_text, remove_temporaries
from holdfast.system.errors import HoldfastError
from holdfast.system.run_claim import FOLDER as CLAIM_FOLDER
from holdfast.system.run_claim import LEAVE_SECONDS, claim_run
from holdfast.train.run_folder.identity import carry_identity, differences
from holdfast.train.run_folder.paths import with_absolute_paths

JOB_FILES = (".log", ".out", ".sbatch", ".json", ".yaml", ".tmp")


@contextmanager
def open_run_folder(config: Config) -> Iterator[Config]:
    """Owns the run folder while it is open: claims it, then writes config.toml (node 0). A refused folder is not touched.
    Yields the configuration for the ranks, which names the run's own copy of the tokenizer."""
    if config.train.save is None:
        yield config
        return
    folder, node = Path(config.train.save), config.parallel.node_rank
    check_run_folder(config)
    with claim_run(folder, f"node-{node}"):
        check_run_folder(config)  # again: another start may have written the folder before this one claimed it
        refuse_live_ranks(folder, config.snapshot.snapshot_dir)
        if node == 0:  # of a start that was killed
            remove_temporaries(folder / "config.toml")
        config = carry_identity(folder.absolute(), config)
        if node == 0:
            publish_text(folder / "config.toml", config_to_toml(with_absolute_paths(config)))
        yield config


def check_run_folder(config: Config) -> None:
    """Refuses a --save folder that holds another run, or something that is not a run. Writes nothing."""
    if config.train.save is None:
        return
    folder = Path(config.train.save)
    existing = folder / "config.toml"
    if existing.exists():
        differing = differences(folder, read_config(existing), config)
        if differing and has_state(folder, config.snapshot.snapshot_dir):
            raise HoldfastError(
                f"{folder} holds another run: {'; '.join(differing)}. Choose another --save folder, or --load {folder} "
                "--finetune to start from its weights"
            )
    elif folder.exists() and any(folder.iterdir()) and not _only_job_files(folder):
        raise HoldfastError(f"{folder} is not empty and not a run (no config.toml); choose another --save folder")


def _only_job_files(folder: Path) -> bool:
    """Whether a launcher wrote its job files here, or a start ended before it wrote config.toml."""
    return (folder / CLAIM_FOLDER).is_dir() or all(entry.suffix in JOB_FILES for entry in folder.iterdir())


def has_state(folder: Path, memory: str) -> bool:
    """Whether the run has done a step: a checkpoint, a logged iteration, or a snapshot in memory."""
    metrics = folder / "metrics.jsonl"
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or bool(checkpoints_in(folder)) or bool(_run_memory(folder, memory).arenas())


def refuse_live_ranks(folder: Path, memory: str) -> None:
    """Raises if ranks outlive the process that had claimed the run. Ranks that are ending get LEAVE_SECONDS."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while live := [page["process"] for page in _run_memory(folder, memory).pages().values() if page.owner_alive()]:
        if time.monotonic() > deadline:
            raise HoldfastError(
                f"{folder} is in use: process {live[0]} still writes to it. Stop that run first: "
                f"holdfast persist {quote(str(folder))} --stop"
            )
        time.sleep(0.1)


def _run_memory(folder: Path, memory: str) -> RunMemory:
    return RunMemory.of(folder.resolve().name, folder, memory)
