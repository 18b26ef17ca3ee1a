"""Keys and values of the tokens so far, in memory that is allocated once and stays where it is.

Each sequence has its own length: a prompt is written from position 0, a later token at the position of its sequence. Entries
beyond a sequence's position are left over from padding and must be masked.

Shapes: B sequences, G query groups, S longest sequence, D head width, T tokens.
"""

import torch
from torch import Tensor

from holdfast.config import ModelConfig
from holdfast.models.layers import Shape

# Attention kernels require masks with aligned rows.
ALIGNMENT = 64


class StaticCache:
    """One layer's cache. `positions_B` is shared by the layers: where the next token of each sequence goes."""

    def __init__(self, keys_BGSD: Tensor, values_BGSD: Tensor, positions_B: Tensor) -> None:
        self._keys, self._values, self._positions = keys_BGSD, values_BGSD, positions_B
        self._rows = torch.arange(len(positions_B), device=positions_B.device)
        self.reading = True

    @property
    def length(self) -> int:
        return self._keys.shape[2]

    def extend(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        if self.reading:
            tokens = key_BGTD.shape[2]
            copies = len(self._rows) // len(key_BGTD)  # sequences that continue the same prompt
            self._keys[:, :, :tokens] = key_BGTD.repeat_interleave(copies, dim=0)
            self._values[:, :, :tokens] = value_BGTD.repeat_interleave(copies, dim=0)
            return key_BGTD, value_BGTD
        self._keys[self._rows, :, self._positions] = key_BGTD[:, :, 0]
        self._values[self._rows, :, self._positions] = value_BGTD[:, :, 0]
        return self._keys, self._values


def build_caches(config: ModelConfig, length: int, positions_B: Tensor, dtype: torch.dtype) -> list[StaticCache]:
    """A cache for each layer, with room for `length` tokens of each sequence."""
    shape = Shape.of(config)
    sizes = (len(positions_B), shape.groups, -(-length // ALIGNMENT) * ALIGNMENT, shape.head)
    caches = []
    for _ in range(config.num_layers):
        keys, values = (torch.zeros(sizes, dtype=dtype, device=positions_B.device) for _ in range(2))
        caches.append(StaticCache(keys, values, positions_B))
    return caches
