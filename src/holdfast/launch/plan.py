"""What a launch will run, resolved and checked before anything is submitted: the same checks as `holdfast train` makes.

Paths become absolute, because the job starts in another place, and `$DATA_PATH` in them is filled in, because the job's
environment may not have it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config import Config, read_config
from holdfast.parallel.layout import ParallelLayout, layout_of
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.run_files.paths import is_weight, with_absolute_paths

TOKENIZER_KEYS = ("vocab_file", "merge_file", "tokenizer_model")

SET_BY_JOB = {
    "--nnodes": "give --nodes",
    "--node-rank": "leave it out",
    "--rdzv-endpoint": "leave it out",
}


@dataclass(frozen=True)
class Plan:
    """A training job: its complete configuration and how the ranks are arranged."""

    config: Config
    layout: ParallelLayout

    @property
    def run(self) -> Path:
        assert self.config.train.save is not None
        return Path(self.config.train.save)

    @property
    def iterations(self) -> int:
        from holdfast.train.schedule import batches_of

        return batches_of(self.config, self.layout.data).iterations(self.config.train.train_iters)

    @property
    def assets(self) -> tuple[str, ...]:
        """Files that have to be fetched: what the tokenizer names and is no file here."""
        named = [getattr(self.config.data, key) for key in TOKENIZER_KEYS]
        return tuple(name for name in named if name and not Path(name).exists())

    def paths(self) -> dict[str, str]:
        """Key → a path that the job must be able to see."""
        data = self.config.data
        prefixes = {f"data_path {i}": prefix for i, prefix in enumerate(prefixes_of(data.data_path), 1)}
        files = {key: value for key in TOKENIZER_KEYS if (value := getattr(data, key)) and value not in self.assets}
        return {"save": str(self.run), **prefixes, **files}


def plan_training(arguments: Sequence[str], nodes: int, gpus_per_node: int | None, here: bool = True) -> Plan:
    """The plan for `train` arguments, or an error with the reason. `here`: the job's files can be seen from this machine."""
    from holdfast.conversion.for_training import loads_other_format
    from holdfast.train.checks.preflight import check_data, resolve
    from holdfast.train.command import parse

    for word in arguments:
        if (own := SET_BY_JOB.get(word.split("=")[0].replace("_", "-"))) is not None:
            raise UsageError(f"{word.split('=')[0]} is set by the job: {own}")
    options = parse(arguments)
    for flag in ("print_config", "dry_run", "json"):
        if getattr(options, flag):
            raise UsageError(f"--{flag.replace('_', '-')} is for `holdfast train` itself, not for a job")
    config = options.config
    ranks = gpus_per_node or config.parallel.nproc_per_node
    config = replace(config, parallel=replace(config.parallel, nnodes=nodes, nproc_per_node=ranks))
    config = with_absolute_paths(config)
    if config.train.save is None:
        raise UsageError("give the run folder with --save: the job's file, its output and its state go there")
    if not here:
        # Tokenizer and data lie on volumes of the cluster: only what needs neither is checked.
        if not config.data.data_path:
            raise UsageError("give the dataset with --data-path: its path prefix as the pods see it")
        return Plan(config, check_shape(config))
    config, layout = resolve(config, vocab_size_given=options.vocab_size_given)
    check_data(config, options.force)
    loads_other_format(config)  # refused here, and not when the job starts
    return Plan(config, layout)


def check_shape(config: Config) -> ParallelLayout:
    from holdfast.parallel.layout import check_layout

    layout = layout_of(config.parallel)
    check_layout(config, layout)
    return layout


def prefixes_of(data_path: Sequence[str]) -> list[str]:
    return [part for part in data_path if not is_weight(part)]


def snapshot_bytes(plan: Plan) -> int:
    """Most that the snapshots take in a node's memory."""
    from holdfast.models.flops import matrix_weights
    from holdfast.parallel.layout import padded_vocab_size
    from holdfast.snapshot.memory.arena import slots_at_most

    model, layout, parallel = plan.config.model, plan.layout, plan.config.parallel
    if model.vocab_size is None:
        raise HoldfastError(
            "vocab_size is not known here, so neither is the size of the snapshots: give --vocab-size or --shm"
        )
    vocab = padded_vocab_size(model.vocab_size, model, layout.tensor)
    embeddings = (model.max_position_embeddings or plan.config.data.seq_length) * model.hidden_size
    embeddings += vocab * model.hidden_size if model.untie_embeddings_and_output_weights else 0
    # fp32 weight and two moments; norms, biases and headers are less than the two percent
    state = 12 * 1.02 * (matrix_weights(model, vocab) + embeddings)
    share = min(1.0, parallel.nproc_per_node / (layout.tensor * layout.pipeline))
    return int(slots_at_most(plan.config.snapshot.snapshot_mode == "peer") * share * state)


def job_needs(config: Path | None) -> tuple[dict[str, Path], Path, int | None]:
    """The folders that a job uses, where its snapshots go, and how much of that they take (None: not known here)."""
    from holdfast.assets.cache import cache_folder

    folders = {"cache": cache_folder()}
    if "DATA_PATH" in os.environ:
        folders["$DATA_PATH"] = Path(os.environ["DATA_PATH"])
    if config is None:
        return folders, Path("/dev/shm"), None
    read = with_absolute_paths(read_config(config))
    folders |= {f"data {i}": Path(prefix).parent for i, prefix in enumerate(prefixes_of(read.data.data_path), 1)}
    if read.train.save:
        folders["run"] = Path(read.train.save)
    plan = Plan(read, layout_of(read.parallel))
    needed = None if read.model.vocab_size is None else snapshot_bytes(plan)
    return folders, Path(read.snapshot.snapshot_dir), needed
