"""A dataset built in partitions: on a cluster each job builds one, a last call joins them.

Partition K of N becomes PREFIX_K_..., as Megatron names its partitions. A finished partition is not built again, and the
partitions merged are byte for byte what one run builds.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from holdfast.data.indexed import pair_paths
from holdfast.data.merge import merge
from holdfast.data.preprocess.build import DatasetBuild, build, refuse_changed_input
from holdfast.data.preprocess.provenance import Summary, completed_summary, describe, refuse_to_replace
from holdfast.data.preprocess.units import Partition
from holdfast.data.preprocess.workers import WorkerPool
from holdfast.system.atomic_files import publish_bytes
from holdfast.system.errors import HoldfastError


def build_partitions(task: DatasetBuild, pool: WorkerPool) -> Summary:
    """Builds one partition, or with no index all that are not finished, and joins them."""
    count, index = task.options.partitions, task.options.partition_index
    partitions = [
        replace(task, prefix=f"{task.prefix}_{number}", partition=Partition(number, count)) for number in range(count)
    ]
    return _join(task, partitions, pool) if index is None else build(partitions[index], pool)


def _join(task: DatasetBuild, partitions: list[DatasetBuild], pool: WorkerPool) -> Summary:
    """Builds the partitions that are not finished, and from all of them the dataset; its provenance file comes last."""
    record, settings = task.record, task.settings()
    # An earlier call was killed while it joined: files that already have a final name may be replaced.
    joining = Path(task.prefix + ".joining")
    if not task.options.overwrite:
        complete = completed_summary(record, settings)
        if complete is not None:
            return complete
        if not joining.exists():
            refuse_to_replace([path for output in task.outputs for path in pair_paths(output)])
    started = time.monotonic()
    # A partition built from the same input is kept, also where the joined dataset is to be replaced.
    summaries = [completed_summary(one.record, one.settings()) or build(one, pool) for one in partitions]
    refuse_changed_input(task, settings)
    with _only_one(joining):
        record.unlink(missing_ok=True)
        merged = [
            merge([one.outputs[key] for one in partitions], output, overwrite=True)
            for key, output in enumerate(task.outputs)
        ]
        summary = replace(
            _sum(summaries), outputs=tuple(task.outputs), seconds=time.monotonic() - started, provenance=str(record)
        )
        _join_bad_lines(task, partitions)
        sizes = [(one.bin_bytes, one.sequences, one.documents) for one in merged]
        publish_bytes(record, describe(task, summary, settings, sizes, {}))
        joining.unlink()
    return summary


@contextlib.contextmanager
def _only_one(joining: Path) -> Iterator[None]:
    """Creates the file and locks it, so that a second call is refused while this one joins."""
    with joining.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HoldfastError(f"another process joins the partitions right now ({joining} is locked)") from None
        except OSError:
            pass  # a file system without flock
        if not joining.exists() or not os.path.samestat(joining.stat(), os.fstat(file.fileno())):
            raise HoldfastError(
                "another process has just joined the partitions; run the command again to see its result"
            )
        yield


def _join_bad_lines(task: DatasetBuild, partitions: list[DatasetBuild]) -> None:
    lists = [Path(one.prefix + ".bad.jsonl") for one in partitions]
    content = b"".join(path.read_bytes() for path in lists if path.exists())
    if content:
        publish_bytes(task.prefix + ".bad.jsonl", content)
    else:
        Path(task.prefix + ".bad.jsonl").unlink(missing_ok=True)


def _sum(summaries: list[Summary]) -> Summary:
    tokens = sum(summary.tokens for summary in summaries)
    size = sum(summary.input_bytes for summary in summaries)
    return replace(
        summaries[0],
        documents=sum(summary.documents for summary in summaries),
        sequences=sum(summary.sequences for summary in summaries),
        tokens=tokens,
        input_bytes=size,
        bytes_per_token=size / tokens if tokens else 0.0,
        bad_lines=sum(summary.bad_lines for summary in summaries),
        peak_memory_bytes=max(summary.peak_memory_bytes for summary in summaries),
        already_complete=False,
    )
