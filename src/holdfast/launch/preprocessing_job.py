"""A preprocessing job: the command that makes each partition, and the one that joins them.

Slurm, Kubernetes and Dask run the same two command lines. Both are the user's own, made complete: paths absolute, because they
run in another folder, and the number of partitions spelled out.
"""

import glob
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.command_line import flags
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers.folder import FILE_KEYS
from holdfast.train.run_folder.paths import absolute, existing

# `holdfast preprocess` exits with this code when it skipped bad lines, as the user allowed.
SKIPPED_LINES = 3


@dataclass(frozen=True)
class PreprocessingJob:
    """`command` joins the partitions; with `--partition-index K` behind it, it makes partition K."""

    command: list[str]
    partitions: int
    output_prefix: str
    paths: dict[str, str]
    """Key → a path that the job must be able to read or write."""

    @property
    def run(self) -> Path:
        """The folder of the jobs' files, beside the dataset."""
        return Path(f"{self.output_prefix}.run")


def preprocessing_job(arguments: Sequence[str], nodes: int, shared_files: bool = True) -> PreprocessingJob:
    """The job that `preprocess` arguments describe, or an error with the reason.

    `shared_files`: this machine sees the files of the job. If not, their existence is not checked.
    """
    from holdfast.data.preprocess.options import PreprocessOptions

    values = asdict(flags.parse(PreprocessOptions, "holdfast preprocess", arguments))
    if values["partition_index"] is not None:
        raise UsageError("--partition-index is for `holdfast preprocess` itself; a launch makes all partitions")
    if "-" in values["input"]:
        raise UsageError("a job cannot read standard input; give files with --input")
    if values["partitions"] < 1:
        raise UsageError(f"--partitions {values['partitions']}: give 1 or more")
    values["partitions"] = nodes if values["partitions"] == 1 else values["partitions"]
    values["input"] = tuple(absolute(name) for name in values["input"])
    values["output_prefix"] = absolute(values["output_prefix"])
    values |= {key: existing(values[key]) for key in FILE_KEYS if values[key]}
    files = {key: values[key] for key in FILE_KEYS if values[key] and Path(values[key]).is_absolute()}
    inputs = {f"input {i}": name for i, name in enumerate(values["input"], 1)}
    if shared_files:
        for key, path in (inputs | files).items():
            if not Path(path).exists() and not glob.glob(path):
                raise HoldfastError(f"{key}: {path} does not exist")
    return PreprocessingJob(
        ["preprocess", *flags.to_arguments(PreprocessOptions(**values))],
        values["partitions"],
        values["output_prefix"],
        {"output_prefix": values["output_prefix"], **inputs, **files},
    )
