"""Tensors of a file as it stores them, in double precision and a few rows at a time: what the forwards of `--verify` read.

The invariant: a read touches the rows that it is asked for and releases their pages, so that a forward needs the memory of
its largest matrix. With `rounded`, values are first rounded to another element type, by arithmetic instead of by bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.conversion.files.torch_reader import StoredTensor
from holdfast.conversion.tensors import Bits, Tensor, convert_bits

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RawTensor:
    shape: tuple[int, ...]
    read: Callable[[int, int], Array]
    """Rows [start, stop)."""
    drop_pages: Callable[[], None]
    rounded: str | None = None

    def rows(self, start: int, stop: int) -> Array:
        values = round_to(self.read(start, stop), self.rounded)
        self.drop_pages()
        return values

    def whole(self) -> Array:
        return self.rows(0, self.shape[0])


def raw_of(tensor: Tensor, drop_pages: Callable[[], None], rounded: str | None) -> RawTensor:
    return RawTensor(tensor.shape, lambda start, stop: tensor.rows(start, stop).floats(), drop_pages, rounded)


def raw_of_stored(stored: StoredTensor, drop_pages: Callable[[], None], rounded: str | None) -> RawTensor:
    def read(start: int, stop: int) -> Array:
        return floats(stored.view()[start:stop], stored.dtype)

    return RawTensor(stored.shape, read, drop_pages, rounded)


def floats(bits: Bits, dtype: str) -> Array:
    return np.array(convert_bits(np.ascontiguousarray(bits), dtype, "F64")).view(np.float64)


def round_to(values: Array, dtype: str | None) -> Array:
    """Values as another element type can hold them: nearest, ties to even; beyond the largest they are infinite."""
    if dtype is None or dtype == "F64":
        return values
    with np.errstate(over="ignore"):
        if dtype == "F16":
            return values.astype(np.float16).astype(np.float64)
        single = values.astype(np.float32).astype(np.float64)
    if dtype == "F32":
        return single
    fraction, exponent = np.frexp(single)
    return np.asarray(np.ldexp(np.rint(fraction * 256), exponent - 8), np.float64)
