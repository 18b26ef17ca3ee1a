"""The digest notices what can happen to memory; both ways of computing it agree."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.snapshot.memory.checksum import rows_in, sum_rows, sum_rows_on_device

contents = st.integers(1, 20_000).flatmap(
    lambda size: st.integers(0, 2**32 - 1).map(
        lambda seed: np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    )
)


def sums_of(content):
    sums = np.zeros(rows_in(len(content)), dtype=np.int64)
    sum_rows(content, sums)
    return sums


@given(contents, st.integers(0, 10**9), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_changes_the_digest_of_its_row_alone(content, position, bit):
    before = sums_of(content)
    content[position % len(content)] ^= 1 << bit
    changed = np.flatnonzero(sums_of(content) != before)
    assert changed.tolist() == [position % len(content) // 4096]


@given(contents)
@settings(max_examples=60, deadline=None)
def test_torch_and_numpy_agree(content):
    sums = torch.zeros(rows_in(len(content)), dtype=torch.int64)
    sum_rows_on_device(torch.from_numpy(content), sums)
    assert sums.tolist() == sums_of(content).tolist()


def test_a_half_torn_constant_tensor_is_noticed():
    whole = np.full(8192, 1.0, dtype=np.float32)
    torn = whole.copy()
    torn[:4096] = 2.0
    assert (sums_of(whole.view(np.uint8)) != sums_of(torn.view(np.uint8))).any()
