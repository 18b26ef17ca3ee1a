"""Keys and values of the tokens so far, in memory that is allocated once.

Shapes: B sequences, G query groups, S longest sequence, D head width.
"""

import torch
from torch import Tensor

from holdfast.config import ModelConfig
from holdfast.models.layers import Shape


class StaticCache:
    """One layer's cache. `extend` appends and gives back everything so far."""

    def __init__(self, batch: int, length: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.zeros(batch, shape.groups, length, shape.head, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self.length = 0

    def extend(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + key_BGTD.shape[2]
        self._keys[:, :, self.length : end] = key_BGTD
        self._values[:, :, self.length : end] = value_BGTD
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def repeat(self, times: int) -> None:
        """The one sequence that was read becomes `times` sequences that continue it."""
        self._keys = self._keys.repeat(times, 1, 1, 1)
        self._values = self._values.repeat(times, 1, 1, 1)


def build_caches(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> list[StaticCache]:
    shape = Shape.of(config)
    return [StaticCache(1, length, shape, dtype, device) for _ in range(config.num_layers)]
