"""A training job, resolved and checked before anything is submitted: the same checks as `holdfast train` makes.

Paths become absolute, because the job starts in another folder, and `$DATA_PATH` in them is filled in, because the job's
environment may not have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config import Config
from holdfast.parallel.layout import ParallelLayout, check_layout, layout_of
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers.folder import FILE_KEYS
from holdfast.train.run_folder.paths import is_weight, with_absolute_paths

SET_BY_JOB = {
    "--nnodes": "give --nodes",
    "--node-rank": "leave it out",
    "--rdzv-endpoint": "leave it out",
}


@dataclass(frozen=True)
class TrainingJob:
    """The complete configuration of a training job, and how its ranks are arranged."""

    config: Config
    layout: ParallelLayout
    flags: tuple[str, ...] = ()
    """Flags of `train` that config.toml does not hold."""

    @property
    def run(self) -> Path:
        assert self.config.train.save is not None
        return Path(self.config.train.save)

    @property
    def nproc_per_node(self) -> int:
        return self.config.parallel.nproc_per_node

    @property
    def iterations(self) -> int:
        from holdfast.train.schedule import batches_of

        return batches_of(self.config, self.layout.data).iterations(self.config.train.train_iters)

    @property
    def assets(self) -> tuple[str, ...]:
        """The tokenizer's names that are not files here: the job fetches them."""
        names = [getattr(self.config.data, key) for key in FILE_KEYS]
        return tuple(name for name in names if name and not Path(name).exists())

    def paths(self) -> dict[str, str]:
        """Key → a path that the job must be able to read or write."""
        data = self.config.data
        prefixes = {f"data_path {i}": prefix for i, prefix in enumerate(dataset_prefixes(self.config), 1)}
        files = {key: value for key in FILE_KEYS if (value := getattr(data, key)) and value not in self.assets}
        return {"save": str(self.run), **prefixes, **files}

    def snapshot_bytes(self) -> int:
        """Upper bound of the memory that the snapshots take on a node."""
        from holdfast.models.flops import matrix_weights
        from holdfast.parallel.layout import padded_vocab_size
        from holdfast.snapshot.memory.arena import slots_at_most

        model, layout = self.config.model, self.layout
        if model.vocab_size is None:
            raise HoldfastError(
                "the size of the snapshots depends on vocab_size, which is unset: give --vocab-size or --shm"
            )
        vocab = padded_vocab_size(model.vocab_size, model, layout.tensor)
        embeddings = (model.max_position_embeddings or self.config.data.seq_length) * model.hidden_size
        embeddings += vocab * model.hidden_size if model.untie_embeddings_and_output_weights else 0
        # fp32 weight and two moments; norms, biases and headers are less than the two percent
        state = 12 * 1.02 * (matrix_weights(model, vocab) + embeddings)
        share = min(1.0, self.nproc_per_node / (layout.tensor * layout.pipeline))
        return int(slots_at_most(self.config.snapshot.snapshot_mode == "peer") * share * state)


def training_job(
    arguments: Sequence[str], nodes: int, gpus_per_node: int | None, shared_files: bool = True
) -> TrainingJob:
    """The job that `train` arguments describe, or an error with the reason.

    `shared_files`: this machine sees the files of the job. If not, tokenizer and data are not checked.
    """
    from holdfast.conversion.train_load import loads_other_format
    from holdfast.train.checks.preflight import check_data, resolve
    from holdfast.train.command import parse

    for word in arguments:
        flag = word.split("=")[0]
        if (advice := SET_BY_JOB.get(flag.replace("_", "-"))) is not None:
            raise UsageError(f"{flag} is set by the job: {advice}")
    options = parse(arguments)
    for name in ("print_config", "dry_run", "json"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is for `holdfast train` itself, not for a job")
    config = options.config
    ranks = gpus_per_node or config.parallel.nproc_per_node
    config = replace(config, parallel=replace(config.parallel, nnodes=nodes, nproc_per_node=ranks))
    config = with_absolute_paths(config)
    if config.train.save is None:
        raise UsageError("give the run folder with --save: batch file, output and state of the job go there")
    if not shared_files:
        if not config.data.data_path:
            raise UsageError("give the dataset with --data-path: its path prefix as the pods see it")
        layout = layout_of(config.parallel)
        check_layout(config, layout)
        flags = ["--force"] if options.force else []
        flags += ["--vocab-size", str(config.model.vocab_size)] if options.vocab_size_given else []
        return TrainingJob(config, layout, tuple(flags))
    config, layout = resolve(config, vocab_size_given=options.vocab_size_given)
    check_data(config, options.force)
    loads_other_format(config)  # refused here, and not when the job starts
    return TrainingJob(config, layout)


def dataset_prefixes(config: Config) -> list[str]:
    return [part for part in config.data.data_path if not is_weight(part)]
