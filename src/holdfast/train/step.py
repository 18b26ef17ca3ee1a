"""One pass over a global batch: losses and gradients, the same in every layout.

Gradients come out summed over the whole batch and complete on every rank that needs them; nothing here steps the optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from holdfast.parallel.data import GradientSum
from holdfast.parallel.mesh import Grid
from holdfast.parallel.pipeline import TiedEmbedding, build_schedule
from holdfast.parallel.tensor import reduce_partial_gradients


@dataclass(frozen=True)
class PassInputs:
    """What one micro batch feeds into the model's stages."""

    x: Tensor
    """Tokens, for the first stage."""
    everywhere: dict[str, Tensor]
    """Arguments that every stage takes: positions, masks."""
    at_loss: dict[str, Tensor]
    """Arguments of the last stage: labels, weights."""
    counted: Tensor | None
    """Targets that each term of the model's output counts, [terms] on the CPU; None: all tokens, for its one term."""

    def keywords(self, last_stage: bool) -> dict[str, Tensor]:
        return {**self.everywhere, **self.at_loss} if last_stage else self.everywhere

    @staticmethod
    def join(batch: "Sequence[PassInputs]") -> "PassInputs":
        """All micro batches as one, in order: what a pipeline schedule wants to split itself."""
        first = batch[0]
        return PassInputs(
            torch.cat([micro.x for micro in batch]),
            {name: torch.cat([micro.everywhere[name] for micro in batch]) for name in first.everywhere},
            {name: torch.cat([micro.at_loss[name] for micro in batch]) for name in first.at_loss},
            None,
        )


def _unwatched(phase: str) -> None: ...


class ForwardBackward:
    """Forward and backward of this rank's stages over the micro batches of a step.

    `begin` is told the name of each phase when the phase begins; nobody listens unless someone takes its place.
    """

    def __init__(
        self, stages: list[nn.Module], grid: Grid, tied: TiedEmbedding, terms: Sequence[str], shapes: dict[str, Any]
    ) -> None:
        self._stages, self._grid, self._tied, self._shapes = stages, grid, tied, shapes
        self._losses = [index for index, name in enumerate(terms) if name.endswith("loss")]
        self._zeros = torch.zeros(len(terms), device=grid.device)
        self._parameters = [p for stage in stages for p in stage.parameters()]
        self._schedules: dict[int, Any] = {}
        self._weights = self._means = self._zeros
        self.begin: Callable[[str], None] = _unwatched
        self._sum: GradientSum | None = None
        if grid.layout.replica > 1 and grid.layout.shard == 1:
            self._sum = GradientSum(self._parameters, grid.group("replica"))

    @property
    def sees_loss(self) -> bool:
        """Whether this rank computes losses: on the last stage, once per tensor-parallel group."""
        last = self._grid.index("pipeline") == self._grid.layout.pipeline - 1
        return last and self._grid.index("tensor") == 0

    def counted_targets(self, batch: Sequence[PassInputs]) -> Tensor:
        """Targets of the global batch that each term counts, on the device: nobody waits for the number."""
        counts = [micro.counted for micro in batch if micro.counted is not None]
        if not counts:
            everything = float(batch[0].x.numel() * len(batch) * self._grid.layout.data)
            return torch.full_like(self._zeros, everything)
        count = torch.stack(counts).sum(0).double().to(self._grid.device, non_blocking=True)
        dist.all_reduce(count, group=self._grid.group("replica", "shard"))
        return count.clamp(min=1.0)

    def gradients(self, batch: Sequence[PassInputs], scale: float) -> Tensor:
        """This rank's share of each term's mean; afterwards `.grad` holds the gradient of scale × the sum of losses."""
        if self._sum is not None:
            self._sum.expect(len(batch))
        means = self._run(batch, scale, True)
        self.begin("communication")
        if self._sum is not None:
            self._sum.wait()
        reduce_partial_gradients(self._parameters)
        self._tied.add_up_gradients()
        return means / scale

    @torch.no_grad()
    def means(self, batch: Sequence[PassInputs]) -> Tensor:
        """This rank's share of each term's mean, without gradients."""
        means = self._run(batch, 1.0, False)
        for stage in self._stages:
            if isinstance(stage, FSDPModule):
                stage.reshard()  # without a backward pass the root would keep its gathered weights
        return means

    def _run(self, batch: Sequence[PassInputs], factor: float, backward: bool) -> Tensor:
        """All micro batches; factor × this rank's share of the means."""
        self._weights = (factor / self.counted_targets(batch)).float()
        self._means = self._zeros
        if self._grid.layout.pipeline > 1:
            self._pipelined(batch, backward)
        else:
            self._plain(batch, backward)
        return self._means if self.sees_loss else self._zeros

    def _weigh(self, sums: Tensor) -> Tensor:
        """The loss of one micro batch from the model's output; notes the terms."""
        means = sums * self._weights
        self._means = self._means + means.detach()
        return torch.stack([means[index] for index in self._losses]).sum()

    def _plain(self, batch: Sequence[PassInputs], backward: bool) -> None:
        (model,) = self._stages
        for index, micro in enumerate(batch):
            if isinstance(model, FSDPModule) and backward:
                model.set_requires_gradient_sync(index == len(batch) - 1)
            self.begin("forward")
            loss = self._weigh(model(micro.x, **micro.keywords(last_stage=True)))
            if backward:
                self.begin("backward")
                loss.backward()

    def _pipelined(self, batch: Sequence[PassInputs], backward: bool) -> None:
        schedule = self._schedule(len(batch))
        first = self._grid.index("pipeline") == 0
        last = self._grid.index("pipeline") == self._grid.layout.pipeline - 1
        joined = PassInputs.join(batch)
        run = schedule.step if backward else schedule.eval
        self.begin("forward and backward")
        arguments = (joined.x,) if first else ()
        keywords = joined.keywords(last_stage=last)
        if last:
            run(*arguments, target=joined.x, losses=[], **keywords)
        else:
            run(*arguments, **keywords)

    def _schedule(self, micro_batches: int) -> Any:
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = build_schedule(
                self._stages,
                self._grid,
                micro_batches=micro_batches,
                terms=len(self._zeros),
                loss=lambda output, _: self._weigh(output),
                **self._shapes,
            )
        return self._schedules[micro_batches]
