"""Random numbers without a state: number k of (seed, purpose, item) is computed from these four, in any order, on any rank.

The computation is SplitMix64, started for each item at a mix of seed, purpose and item. It is written out here, because a
generator of a library may change its stream with a new version, and an interrupted run must go on with the same samples.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ITEM = np.uint64(0xD1B54A32D192ED03)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _FACTORS[0]
    words = (words ^ (words >> np.uint64(27))) * _FACTORS[1]
    return words ^ (words >> np.uint64(31))


def random_words(seed: int, purpose: int, items: npt.NDArray[np.integer] | int, count: int) -> Words:
    """`count` words of 64 random bits for each item: [items, count]."""
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN) + np.uint64(purpose))
    states = _mix(key + np.atleast_1d(np.asarray(items)).astype(np.uint64) * _ITEM)
    return _mix(states[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Words as numbers in [0, 1), 53 bits each."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
