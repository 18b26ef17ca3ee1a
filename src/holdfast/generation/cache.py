"""Keys and values of the tokens so far, in memory that is allocated once and stays where it is.

A slot holds one sequence. Each slot has its own length: a prompt is written from position 0, a later token at the position of its
sequence. Entries beyond a sequence's position are left over from padding or from earlier sequences and must be masked.

Shapes: N layers, B slots, G query groups, S longest sequence, D head width, T tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.config import ModelConfig
from holdfast.models.layers import Shape
from holdfast.system.errors import HoldfastError

# Attention kernels require masks with aligned rows.
ALIGNMENT = 64


class SlotCache:
    """The keys and values of all layers and slots. Their addresses never change."""

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = Shape.of(config)
        sizes = (config.num_layers, slots, shape.groups, -(-length // ALIGNMENT) * ALIGNMENT, shape.head)
        try:
            self.keys_NBGSD, self.values_NBGSD = (torch.zeros(sizes, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if "memory" not in str(error).lower():
                raise
            gigabytes = 2 * math.prod(sizes) * dtype.itemsize / 1e9
            raise HoldfastError(
                f"the cache for {slots} sequences of {length:,} tokens ({gigabytes:,.1f} GB) does not fit into memory; generate "
                "fewer or shorter texts at a time (serve: a smaller --slots)"
            ) from error

    @property
    def length(self) -> int:
        return self.keys_NBGSD.shape[3]

    def reading(self, slots: Sequence[Sequence[int]]) -> list["PromptLayer"]:
        """Layers that write whole prompts; row i of the batch goes into the slots `slots[i]`."""
        device = self.keys_NBGSD.device
        places = torch.tensor([slot for row in slots for slot in row], device=device)
        rows = torch.tensor([row for row, several in enumerate(slots) for _ in several], device=device)
        return self.reading_into(places, rows)

    def reading_into(self, places: Tensor, rows: Tensor) -> list["PromptLayer"]:
        """Layers that write whole prompts: row `rows[i]` of the batch goes into slot `places[i]`."""
        pairs = zip(self.keys_NBGSD, self.values_NBGSD, strict=True)
        return [PromptLayer(keys, values, places, rows) for keys, values in pairs]

    def writing(self, positions_BT: Tensor, span: int) -> list["TokenLayer"]:
        """Layers that write T tokens of the slots 0 to B - 1 at their positions and attend to the first `span` entries."""
        count = len(positions_BT)
        rows = torch.arange(count, device=positions_BT.device)[:, None]
        pairs = zip(self.keys_NBGSD, self.values_NBGSD, strict=True)
        return [
            TokenLayer(keys[:count, :, :span], values[:count, :, :span], rows, positions_BT) for keys, values in pairs
        ]


class PromptLayer:
    """One layer of the cache while prompts are read from position 0."""

    def __init__(self, keys_BGSD: Tensor, values_BGSD: Tensor, places: Tensor, rows: Tensor) -> None:
        self._keys, self._values, self._places, self._rows = keys_BGSD, values_BGSD, places, rows

    def extend(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        tokens = key_BGTD.shape[2]
        self._keys[self._places, :, :tokens] = key_BGTD[self._rows]
        self._values[self._places, :, :tokens] = value_BGTD[self._rows]
        return key_BGTD, value_BGTD


class TokenLayer:
    """One layer of the cache while each slot writes tokens at its own positions."""

    def __init__(self, keys_BGSD: Tensor, values_BGSD: Tensor, rows_B1: Tensor, positions_BT: Tensor) -> None:
        self._keys, self._values, self._rows, self._positions = keys_BGSD, values_BGSD, rows_B1, positions_BT

    def extend(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        self._keys[self._rows, :, self._positions] = key_BGTD.transpose(1, 2)
        self._values[self._rows, :, self._positions] = value_BGTD.transpose(1, 2)
        return self._keys, self._values
