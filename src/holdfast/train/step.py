"""Forward and backward over a global batch: the same losses and gradients in every layout.

Afterwards each rank holds the gradients of its parameters, summed over the whole batch. Nothing here steps the optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from holdfast.kernels.trials import milliseconds
from holdfast.parallel.data import GradientSum
from holdfast.parallel.mesh import Grid
from holdfast.parallel.pipeline import TiedEmbedding, build_schedule
from holdfast.parallel.tensor import reduce_partial_gradients, transformer_layers
from holdfast.parallel.zero import GradientScatter
from holdfast.system.progress import log
from holdfast.train.captured_pass import EAGER_STEPS, CapturedPass
from holdfast.train.kernel_choice import GraphChoice


@dataclass(frozen=True)
class PassInputs:
    """The arguments of the model's stages for one micro batch."""

    x: Tensor
    """Tokens, for the first stage."""
    stage_inputs: dict[str, Tensor]
    """Arguments of every stage: positions, masks."""
    loss_inputs: dict[str, Tensor]
    """Arguments of the last stage: labels, weights."""
    target_counts: Tensor | None
    """Number of targets of each term of the model's output, [terms] on the CPU, or [1] for all. None: all over all tokens."""

    def keywords(self, last_stage: bool) -> dict[str, Tensor]:
        return {**self.stage_inputs, **self.loss_inputs} if last_stage else self.stage_inputs

    @staticmethod
    def join(batch: "Sequence[PassInputs]") -> "PassInputs":
        """All micro batches as one, in order: a pipeline schedule splits them itself."""
        first = batch[0]
        return PassInputs(
            torch.cat([micro.x for micro in batch]),
            {name: torch.cat([micro.stage_inputs[name] for micro in batch]) for name in first.stage_inputs},
            {name: torch.cat([micro.loss_inputs[name] for micro in batch]) for name in first.loss_inputs},
            None,
        )


def can_capture(stages: list[nn.Module], grid: Grid) -> bool:
    """Whether a pass is one CUDA graph: one stage of fused layers on one GPU, so without collectives and dropout."""
    layers = [layer for stage in stages for layer in transformer_layers(stage)]
    return grid.layout.world == 1 and grid.device.type == "cuda" and all(getattr(x, "fused", False) for x in layers)


def _gradient_sums(
    stages: list[nn.Module], grid: Grid, updated: Mapping[nn.Parameter, nn.Parameter]
) -> list[GradientSum]:
    """What sums the gradients of replicas; FSDP2 sums those of its shards itself."""
    layout = grid.layout
    if layout.shards_updates:  # per stage: the passes of two stages alternate, and buckets of both would wait for both
        every_pass = layout.sharding == "optim_grads"
        return [GradientScatter(list(stage.parameters()), updated, grid, every_pass) for stage in stages]
    if layout.replica > 1 and layout.shard == 1:
        return [GradientSum([p for stage in stages for p in stage.parameters()], grid.group("replica"))]
    return []


class ForwardBackward:
    """Forward and backward of this rank's stages over the micro batches of a step.

    `on_phase` is called with the name of each phase when the phase begins.
    """

    def __init__(
        self,
        stages: list[nn.Module],
        grid: Grid,
        tied: TiedEmbedding,
        updated: Mapping[nn.Parameter, nn.Parameter],
        terms: Sequence[str],
        shapes: dict[str, Any],
        graph: bool | None = None,
        graph_choice: GraphChoice | None = None,
    ) -> None:
        self._stages, self._grid, self._tied, self._shapes = stages, grid, tied, shapes
        self._updated = list(updated.values())
        self._losses = [index for index, name in enumerate(terms) if name.endswith("loss")]
        self._zeros = torch.zeros(len(terms), device=grid.device)
        self._parameters = [p for stage in stages for p in stage.parameters()]
        self._schedules: dict[int, Any] = {}
        self._weights = self._means = self._zeros
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._sums = _gradient_sums(stages, grid, updated)
        known = graph_choice.known() if graph_choice and graph is None else graph
        self._captures, self._choice = known is not False and can_capture(stages, grid), graph_choice
        self._measures = known is None and graph_choice is not None
        if graph and not self._captures and grid.rank == 0:
            log("warning: --cuda-graph has no effect here: it needs a run on one GPU whose layers are Triton kernels")
        self._captured: CapturedPass | None = None
        self._eager_steps, self._eager_ms = 0, 0.0

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses: on the last stage, once per tensor-parallel group."""
        last = self._grid.index("pipeline") == self._grid.layout.pipeline - 1
        return last and self._grid.index("tensor") == 0

    def global_target_counts(self, batch: Sequence[PassInputs]) -> Tensor:
        """Number of targets of each term in the global batch, on the device, without a synchronization."""
        counts = [micro.target_counts for micro in batch if micro.target_counts is not None]
        if not counts:
            tokens = float(batch[0].x.numel() * len(batch) * self._grid.layout.data)
            return torch.full_like(self._zeros, tokens)
        count = torch.stack(counts).sum(0).double().to(self._grid.device, non_blocking=True)
        dist.all_reduce(count, group=self._grid.group("replica", "shard"))
        return count.clamp(min=1.0)

    def gradients(self, batch: Sequence[PassInputs], scale: float) -> Tensor:
        """This rank's share of each term's mean; afterwards `.grad` holds the gradient of scale × the sum of losses."""
        for gradient_sum in self._sums:
            gradient_sum.expect(len(batch))
        means = self._run(batch, scale, True)
        self.on_phase("communication")
        for gradient_sum in self._sums:
            gradient_sum.wait()
        reduce_partial_gradients(self._updated)
        self._tied.sum_gradients()
        return means / scale

    @torch.no_grad()
    def means(self, batch: Sequence[PassInputs]) -> Tensor:
        """This rank's share of each term's mean, without gradients."""
        means = self._run(batch, 1.0, False)
        for stage in self._stages:
            if isinstance(stage, FSDPModule):
                stage.reshard()  # without a backward pass the root keeps its gathered weights
        return means

    def _run(self, batch: Sequence[PassInputs], factor: float, backward: bool) -> Tensor:
        """Runs all micro batches; factor × this rank's share of the means."""
        self._weights = (factor / self.global_target_counts(batch)).float()
        self._means = self._zeros
        if self._grid.layout.pipeline > 1:
            self._pipelined(batch, backward)
        elif not (backward and self._captures and self._replayed(batch)):
            self._plain(batch, backward)
        return self._means if self.has_loss else self._zeros

    def _replayed(self, batch: Sequence[PassInputs]) -> bool:
        """Runs the batch through a CUDA graph, recorded after a few eager steps; False if it must run eagerly."""
        inputs = [{"x": one.x, "weights": self._weights, **one.keywords(last_stage=True)} for one in batch]
        if self._captured is not None and not self._captured.takes(inputs):
            self._captured = None  # a graph of the earlier shape would hold a second set of activations
        self._eager_steps += 1
        if self._eager_steps <= EAGER_STEPS:
            return False
        if self._eager_steps == EAGER_STEPS + 1 and self._measures:
            self._eager_ms = milliseconds(lambda: self._plain(batch, True))
            return True
        if self._captured is None and not self._record(inputs):
            return False
        self.on_phase("forward and backward")
        assert self._captured is not None
        self._means = self._captured.replay(inputs)
        return True

    def _record(self, inputs: list[dict[str, Tensor]]) -> bool:
        """Records the graph; False if that fails, or if it is slower than launching kernel by kernel."""
        weights, reason = self._weights, ""
        try:
            self._captured = CapturedPass(self._traced, self._parameters, inputs[0], accumulates=len(inputs) > 1)
            if self._measures and self._choice:
                captured, self._measures = self._captured, False
                graph_ms = min(milliseconds(lambda: captured.replay(inputs)) for _ in range(2))
                reason = "" if self._choice.decide(self._eager_ms, graph_ms) else "it is slower"
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            log(f"warning: no CUDA graph of the pass ({reason}); training continues without it, at a lower speed")
        self._weights, self._means = weights, self._zeros
        if not reason:
            return True
        self._captures, self._captured = False, None
        for parameter in self._parameters:
            parameter.grad = None  # a part of them may be there
        return False

    def _traced(self, inputs: dict[str, Tensor]) -> Tensor:
        """What the graph records."""
        (model,) = self._stages
        arguments = dict(inputs)
        x, self._weights, self._means = arguments.pop("x"), arguments.pop("weights"), self._zeros
        self._weighted_loss(model(x, **arguments)).backward()
        return self._means

    def _weighted_loss(self, sums: Tensor) -> Tensor:
        """The loss of one micro batch from the model's output; adds its terms to the means."""
        means = sums * self._weights
        self._means = self._means + means.detach()
        return torch.stack([means[index] for index in self._losses]).sum()

    def _plain(self, batch: Sequence[PassInputs], backward: bool) -> None:
        (model,) = self._stages
        for index, micro in enumerate(batch):
            if isinstance(model, FSDPModule) and backward:
                model.set_requires_gradient_sync(index == len(batch) - 1)
            self.on_phase("forward")
            loss = self._weighted_loss(model(micro.x, **micro.keywords(last_stage=True)))
            if backward:
                self.on_phase("backward")
                loss.backward()

    def _pipelined(self, batch: Sequence[PassInputs], backward: bool) -> None:
        schedule = self._schedule(len(batch))
        first = self._grid.index("pipeline") == 0
        last = self._grid.index("pipeline") == self._grid.layout.pipeline - 1
        joined = PassInputs.join(batch)
        run = schedule.step if backward else schedule.eval
        self.on_phase("forward and backward")
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
                loss=lambda output, _: self._weighted_loss(output),
                **self._shapes,
            )
        return self._schedules[micro_batches]
