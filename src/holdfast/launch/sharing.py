"""Preprocessing shared out: the commands that make the shares, and the one that joins them.

Slurm, Kubernetes and Dask run the same two command lines. Both are the user's own, made complete: paths absolute, because they
run in another place, and the number of partitions spelled out.
"""

import glob
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.command_line import flags
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.run_files.paths import absolute, existing

# `holdfast preprocess` ends with this code when all is done but lines were skipped, as the user allowed.
SKIPPED_LINES = 3


@dataclass(frozen=True)
class Sharing:
    """`command` joins the shares; with `--partition-index K` behind it, it makes share K."""

    command: list[str]
    partitions: int
    output_prefix: str
    paths: dict[str, str]
    assets: tuple[str, ...]

    @property
    def run(self) -> Path:
        """The folder of the jobs' files: beside the dataset that they make."""
        return Path(f"{self.output_prefix}.run")


def share_preprocessing(arguments: Sequence[str], nodes: int, here: bool = True) -> Sharing:
    """The commands for `preprocess` arguments, or an error with the reason. `here`: the files can be seen from this machine."""
    from holdfast.data.command import PreprocessOptions

    values = asdict(flags.parse(PreprocessOptions, "holdfast preprocess", arguments))
    if values["partition_index"] is not None:
        raise UsageError("--partition-index is for `holdfast preprocess` itself; a launch makes all of them")
    if "-" in values["input"]:
        raise UsageError("several partitions cannot read standard input; give files")
    if values["partitions"] < 1:
        raise UsageError(f"--partitions {values['partitions']}: give 1 or more")
    values["partitions"] = nodes if values["partitions"] == 1 else values["partitions"]
    values["input"] = tuple(absolute(name) for name in values["input"])
    values["output_prefix"] = absolute(values["output_prefix"])
    names = {key: values[key] for key in ("vocab_file", "merge_file", "tokenizer_model") if values[key]}
    values |= {key: existing(name) for key, name in names.items()}
    files = {key: values[key] for key in names if Path(values[key]).is_absolute()}
    if here:
        require_there({f"input {name}": name for name in values["input"]} | files)
    paths = {f"input {i}": name for i, name in enumerate(values["input"], 1)}
    return Sharing(
        ["preprocess", *flags.to_arguments(PreprocessOptions(**values))],
        values["partitions"],
        values["output_prefix"],
        {"output_prefix": values["output_prefix"], **paths, **files},
        tuple(values[key] for key in names if key not in files),
    )


def require_there(paths: dict[str, str]) -> None:
    for key, path in paths.items():
        if not Path(path).exists() and not glob.glob(path):
            raise HoldfastError(f"{key}: there is no such file")
