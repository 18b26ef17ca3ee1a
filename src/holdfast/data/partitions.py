"""A dataset made in shares: on a cluster each job makes one, a last call joins them.

Share K of N becomes PREFIX_K_..., as Megatron names its partitions. A finished share is not made again, and the shares merged
are byte for byte what one run makes.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.data.crew import Crew
from holdfast.data.merge import merge
from holdfast.data.plan import Share
from holdfast.data.provenance import Summary
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.data.making import Request


def preprocess_partitions(request: "Request", partitions: int, index: int | None) -> Summary:
    """One share, or with no index all shares that are not finished and then the whole."""
    from holdfast.data.making import run as run_with

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
    started = time.monotonic()
    requests = [share(number) for number in range(partitions)]
    summaries = [run(one) for one in requests]
    for key, output in enumerate(request.outputs):
        merge([one.outputs[key] for one in requests], output, overwrite=True)
    tokens = sum(summary.tokens for summary in summaries)
    size = sum(summary.input_bytes for summary in summaries)
    return replace(
        summaries[0],
        outputs=tuple(request.outputs),
        documents=sum(summary.documents for summary in summaries),
        sequences=sum(summary.sequences for summary in summaries),
        tokens=tokens,
        input_bytes=size,
        bytes_per_token=size / tokens if tokens else 0.0,
        bad_lines=sum(summary.bad_lines for summary in summaries),
        seconds=time.monotonic() - started,
        peak_memory_bytes=max(summary.peak_memory_bytes for summary in summaries),
        already_complete=False,
    )
