"""Dropout whose mask several ranks can draw alike.

Where a rank has activations of its own, the mask comes from torch's default generator, which every rank seeds differently. Where
tensor-parallel ranks hold copies of one activation, all must drop the same elements although their default generators differ:
the mask is then a pure function of a key that the ranks share. It depends on no generator state, so recomputing an activation
with the same key gives the same mask; and as one operator it breaks no graph of torch.compile.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Keys = tuple[Tensor, Tensor]
"""One key for each of a layer's two masks: int64 scalars on the CPU."""


@torch.library.custom_op("holdfast::keep_mask", mutates_args=())
def keep_mask(shape: Sequence[int], keep: float, key: Tensor, device: torch.device) -> Tensor:
    """True with probability `keep`."""
    generator = torch.Generator(device).manual_seed(int(key))
    return torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(keep, generator=generator)


@keep_mask.register_fake
def _(shape: Sequence[int], keep: float, key: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=device)


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p). With a key the mask follows from the key."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if key is None or not self.training:
            return F.dropout(x, self.p, self.training)
        mask = keep_mask(x.shape, 1 - self.p, key, x.device)
        return torch.where(mask, x * (1 / (1 - self.p)), 0.0)


class DropoutKeys:
    """A stream of keys that is equal on all ranks that seed it alike."""

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def seed(self, number: int) -> None:
        self._generator.manual_seed(number)

    def draw(self, layers: int) -> list[Keys]:
        """The keys of one forward pass: a pair per layer, and a last pair whose first key is the embedding's."""
        keys = torch.randint(2**62, (layers + 1, 2), generator=self._generator)
        return [(pair[0], pair[1]) for pair in keys]
