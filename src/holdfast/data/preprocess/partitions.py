"""A dataset made in shares: on a cluster each job makes one, a last call joins them.

Share K of N becomes PREFIX_K_..., as Megatron names its partitions. A finished share is not made again, and the shares merged
are byte for byte what one run makes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.data.indexed import pair_paths
from holdfast.data.merge import merge
from holdfast.data.preprocess.provenance import Summary, describe, finished_before, provenance_path, refuse_to_replace
from holdfast.data.preprocess.units import Share
from holdfast.data.preprocess.workers import Crew
from holdfast.system.atomic_files import publish_bytes
from holdfast.system.errors import UsageError

if TYPE_CHECKING:
    from holdfast.data.preprocess.run import Request


def preprocess_partitions(request: "Request", partitions: int, index: int | None) -> Summary:
    """One share, or with no index all shares that are not finished and then the whole."""
    from holdfast.data.preprocess.run import run as run_with

    if any(file.path == "-" for file in request.files):
        raise UsageError("standard input cannot be shared out: --partitions wants files")
    if index is not None and not 0 <= index < partitions:
        raise UsageError(f"--partition-index {index}: partitions count from 0 to {partitions - 1}")

    def share(number: int) -> "Request":
        return replace(request, prefix=f"{request.prefix}_{number}", share=Share(number, partitions))

    def run(one: "Request") -> Summary:
        with Crew(one.workers) as crew:
            crew.prepare(one.recipe, one.engine)
            return run_with(one, crew)

    if index is not None:
        return run(share(index))
    return _join(request, [share(number) for number in range(partitions)], run)


def _join(request: "Request", shares: list["Request"], run: Callable[["Request"], Summary]) -> Summary:
    """Makes the shares that are not finished, and of all of them the dataset with its record, which comes last."""
    from holdfast.data.preprocess.run import record_details

    record = provenance_path(request.prefix, [file.path for file in request.files])
    # An earlier call was killed while it joined: what has a final name already may be replaced.
    joining = Path(request.prefix + ".joining")
    if not request.overwrite:
        complete = finished_before(record, request.settings())
        if complete is not None:
            return complete
        if not joining.exists():
            refuse_to_replace([path for output in request.outputs for path in pair_paths(output)])
    started = time.monotonic()
    summaries = [run(one) if (done := _finished(one)) is None else done for one in shares]
    publish_bytes(joining, b"")
    record.unlink(missing_ok=True)
    merged = [
        merge([one.outputs[key] for one in shares], output, overwrite=True)
        for key, output in enumerate(request.outputs)
    ]
    summary = replace(
        _sum(summaries), outputs=tuple(request.outputs), seconds=time.monotonic() - started, provenance=str(record)
    )
    _join_bad_lines(request, shares)
    sizes = [(one.bin_bytes, one.sequences, one.documents) for one in merged]
    publish_bytes(record, describe(summary, request.settings(), record_details(request, sizes, {})))
    joining.unlink()
    return summary


def _finished(share: "Request") -> Summary | None:
    """A share that was made of the same is kept, also where the joined dataset is to be replaced."""
    return finished_before(provenance_path(share.prefix, [file.path for file in share.files]), share.settings())


def _join_bad_lines(request: "Request", shares: list["Request"]) -> None:
    lists = [Path(one.prefix + ".bad.jsonl") for one in shares]
    content = b"".join(path.read_bytes() for path in lists if path.exists())
    if content:
        publish_bytes(request.prefix + ".bad.jsonl", content)
    else:
        Path(request.prefix + ".bad.jsonl").unlink(missing_ok=True)


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
