"""Random numbers without a state: number k of (seed, purpose, item) is computed from these four, in any order, on any rank.

The computation is SplitMix64, started for each item at a mix of seed, purpose and item. It is written out here, because a
generator of a library may change its stream with a new version, and an interrupted run must go on with the same samples.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN, _ITEM = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FACTORS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    """The same for a single word: for one item at a time this is several times faster than an array of one."""
    word = ((word ^ (word >> 30)) * _FACTORS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _FACTORS[1]) & _MASK
    return word ^ (word >> 31)


def random_words(seed: int, purpose: int, items: npt.NDArray[np.integer] | int, count: int) -> Words:
    """`count` words of 64 random bits for each item: [items, count]."""
    key = _mix_one((_mix_one((seed + _GOLDEN) & _MASK) + purpose) & _MASK)
    if isinstance(items, int):
        states = np.array([_mix_one((key + items * _ITEM) & _MASK)], dtype=np.uint64)
    else:
        states = _mix(np.uint64(key) + items.astype(np.uint64) * np.uint64(_ITEM))
    return _mix(states[:, None] + _steps(count))


@lru_cache(maxsize=1024)
def _steps(count: int) -> Words:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Words as numbers in [0, 1), 53 bits each."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
