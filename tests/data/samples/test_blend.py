"""The blending rule, computed side by side, against Megatron's loop."""

from pathlib import Path

import numpy as np
import pytest

from holdfast.data.samples import blend
from holdfast.data.samples.blend import BlendedSamples, fill_blend_index, normalize, parse_data_path, split_blend
from holdfast.system.errors import HoldfastError


def draw_one_by_one(shares: list[float], size: int, limits: list[int] | None = None) -> tuple[list[int], list[int]]:
    """The rule, written down plainly."""
    drawn = [0] * len(shares)
    datasets, samples = [], []
    for step in range(size):
        best, best_behind = -1, -np.inf
        for number, share in enumerate(shares):
            behind = share * float(max(step, 1)) - drawn[number]
            if behind > best_behind and (limits is None or drawn[number] < limits[number]):
                best, best_behind = number, behind
        datasets.append(best)
        samples.append(drawn[best])
        drawn[best] += 1
    return datasets, samples


def draw_side_by_side(shares: list[float], size: int, limits: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    dataset, sample = np.full(size, -1, dtype=np.int16), np.full(size, -1, dtype=np.int64)
    fill_blend_index(dataset, sample, shares, limits)
    return dataset, sample


WEIGHTS = [
    [1.0],
    [0.3, 0.7],
    [1, 1],
    [1, 1, 1],
    [0.1, 0.2, 0.3, 0.4],
    [1e-5, 1.0],
    [1e-4, 1e-3, 1.0, 0.5, 0.02],
    list(np.exp(3 * np.random.default_rng(1).standard_normal(30))),
    list(np.random.default_rng(2).random(100)),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)} from {min(weights):.3g}")
@pytest.mark.parametrize("size", [1, 3, 257, 5000])
def test_order_equals_the_plain_loop(weights: list[float], size: int) -> None:
    shares = normalize(weights)
    expected = draw_one_by_one(shares, size)
    actual = draw_side_by_side(shares, size)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("limits", [[5], [100, 100], [1, 999], [300, 20, 7, 1], [1000, 1, 1, 500]])
def test_exhausting_order_equals_the_plain_loop(limits: list[int]) -> None:
    size = sum(limits)
    expected = draw_one_by_one(normalize(limits), size, limits)
    np.testing.assert_array_equal(draw_side_by_side(normalize(limits), size, limits), expected)


def test_order_equals_megatron_core_over_many_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    monkeypatch.setattr(blend, "STRETCHES", 64)
    for weights in ([0.3, 0.7], [7, 1, 22.5, 3], list(np.random.default_rng(3).random(17)), [1e-6, 1, 3]):
        shares, size = normalize(weights), 700_001
        dataset, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
        helpers.build_blending_indices(dataset, sample, shares, len(shares), size, False)
        np.testing.assert_array_equal(draw_side_by_side(shares, size), (dataset, sample))


class Numbers:
    """Samples that are their own numbers, in the tens of their dataset."""

    def __init__(self, tens: int, size: int) -> None:
        self.identity = {"tens": tens, "size": size}
        self.tens, self.size = tens, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return 10 * self.tens + index


def test_blend_hands_out_each_sample_once_and_in_order(tmp_path: Path) -> None:
    samples = BlendedSamples([Numbers(1, 3), Numbers(2, 6)], [1, 2], 9, "train", tmp_path)
    drawn = [samples[index] for index in range(len(samples))]
    assert [number for number in drawn if number < 20] == [10, 11, 12]
    assert [number for number in drawn if number >= 20] == [20, 21, 22, 23, 24, 25]


def test_blend_that_would_run_dry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"draws 5 samples from dataset 1, which has 3"):
        BlendedSamples([Numbers(1, 3), Numbers(2, 9)], [1, 1], 10, "train", tmp_path)


def test_one_string_is_divided_where_it_is_a_blend_and_not_where_it_is_a_path_with_blanks(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.bin").touch()
        (tmp_path / f"{name}.idx").touch()
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert split_blend([f"{one} {two}"]) == [one, two]
    assert split_blend(["0.3 a 0.7 b"]) == ["0.3", "a", "0.7", "b"]
    assert split_blend(["my folder/a"]) == ["my folder/a"] and split_blend([""]) == []
    with pytest.raises(HoldfastError, match=r"my folder/a\.bin does not exist"):
        parse_data_path([f"{tmp_path}/my folder/a"])
