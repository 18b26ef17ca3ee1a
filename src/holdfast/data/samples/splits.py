"""Which documents are for training, which for validation and which for test: Megatron's `--split`, to the document.

The rounding is Megatron's: shares are normalised and added up in float64, and a boundary is the nearest whole document,
halves to the even one.
"""

import itertools
import re

import numpy as np

from holdfast.system.errors import UsageError

SPLITS = ("train", "valid", "test")


def split_shares(split: str) -> list[float]:
    """The three shares of a string such as `969,30,1` or `99,1`, as fractions of one."""
    if re.fullmatch(r"[\s,/.\d]*\d[\s,/.\d]*", split) is None:
        raise _unreadable(split)
    try:
        shares = [float(share) for share in re.findall(r"[.\d]+", split)]
    except ValueError:
        raise _unreadable(split) from None
    if len(shares) > len(SPLITS) or sum(shares) == 0:
        raise _unreadable(split)
    shares += [0.0] * (len(SPLITS) - len(shares))
    weights = np.array(shares, dtype=np.float64)
    return [float(share) for share in weights / np.sum(weights)]


def split_ranges(split: str, count: int) -> list[range | None]:
    """The documents `[begin, end)` of each split out of `count`; None for a split that has no share."""
    edges: list[float] = [0.0]
    for share in split_shares(split):
        edges.append(edges[-1] + share)
    return [
        range(round(begin * float(count)), round(end * float(count))) if end > begin else None
        for begin, end in itertools.pairwise(edges)
    ]


def _unreadable(split: str) -> UsageError:
    return UsageError(f"split '{split}': give up to three shares for training, validation and test, such as 969,30,1")
