"""Pipeline parallelism on torch.distributed.pipelining: the stages of this rank, their schedule, and the tied embedding.

With tied weights the first and the last stage both hold the embedding. Its gradients are summed over the two before each step, so
that both copies get the same update.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import local

TIED = "embedding.word_embeddings.weight"


def build_schedule(
    stages: list[nn.Module],
    grid: Grid,
    *,
    micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    hidden_size: int,
    sequence_shards: int,
    terms: int,
    dtype: torch.dtype,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """The 1F1B schedule; interleaved 1F1B when this rank has several stages."""
    # Here: a run without pipeline parallelism starts without the second that this import takes.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    pipeline, rank = grid.layout.pipeline, grid.index("pipeline")
    total_stages = pipeline * len(stages)
    tokens = torch.empty(micro_batch_size, seq_length, dtype=torch.int64, device="meta")
    hidden = torch.empty(micro_batch_size, seq_length // sequence_shards, hidden_size, dtype=dtype, device="meta")
    hidden.requires_grad_()  # marks that gradients flow back between stages
    sums = torch.empty(terms, dtype=torch.float32, device="meta")
    built: list[Any] = []
    for index, stage in enumerate(stages):
        number = rank + index * pipeline
        built.append(
            PipelineStage(
                stage,
                number,
                total_stages,
                grid.device,
                input_args=(tokens if number == 0 else hidden,),
                output_args=(sums if number == total_stages - 1 else hidden,),
                group=grid.group("pipeline"),
            )
        )
    if len(built) == 1:
        return Schedule1F1B(built[0], micro_batches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B(built, micro_batches, loss_fn=loss, scale_grads=False)


class TiedEmbedding:
    """The embedding that the first and the last pipeline rank both hold (what is `updated` of it), and the group of these two."""

    def __init__(
        self, stages: list[nn.Module], grid: Grid, tied: bool, updated: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self._group: dist.ProcessGroup | None = None
        self.copy: nn.Parameter | None = None
        if not tied or grid.layout.pipeline == 1:
            return
        layout = grid.layout
        per_stage = layout.world // layout.pipeline
        # every rank must create every group, in the same order
        for offset in range(per_stage):
            ends = [offset, offset + (layout.pipeline - 1) * per_stage]
            group = dist.new_group(ends)
            if grid.rank in ends:
                self._group = group
        if self._group is not None:
            self._matrices = [updated[p] for stage in stages for name, p in stage.named_parameters() if name == TIED]
            if grid.index("pipeline") == layout.pipeline - 1:
                self.copy = self._matrices[0]

    def sum_gradients(self) -> None:
        if self._group is not None:
            for matrix in self._matrices:
                assert matrix.grad is not None
                dist.all_reduce(local(matrix.grad), group=self._group)
