"""The division of the work: any tensors, any copies, any cut."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.layout import ITEM_SIZES, TensorSlice
from holdfast.checkpoint.plan import LocalTensor, divide, plan_hash, ranks_to_persist

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_SIZES)), st.booleans()), min_size=1, max_size=8)


def whole(number: int, shape: tuple[int, ...], dtype: str) -> TensorSlice:
    return TensorSlice(f"t{number:02d}", dtype, shape, (0,) * len(shape), shape)


def elements(piece: TensorSlice) -> list[tuple[int, ...]]:
    found = [()]
    for offset, size in zip(piece.offset, piece.shape, strict=True):
        found = [(*index, offset + i) for index in found for i in range(size)]
    return [(piece.name, *index) for index in found]


@given(tensors, st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_every_element_is_kept_once_per_cohort_whatever_the_shapes(drawn, ranks, cohorts):
    held = [
        LocalTensor(whole(number, shape, dtype), divisible) for number, (shape, dtype, divisible) in enumerate(drawn)
    ]
    of_rank = [rank % cohorts for rank in range(ranks)]
    kept = divide([held] * ranks, of_rank)
    wanted = Counter(element for item in held for element in elements(item.box))
    for replica_set in set(of_rank):
        mine = [piece for rank in range(ranks) if of_rank[rank] == replica_set for piece in kept[rank]]
        assert Counter(element for piece in mine for element in elements(piece)) == wanted
    written = [piece for rank in ranks_to_persist(kept) for piece in kept[rank]]
    assert {element for piece in written for element in elements(piece)} == set(wanted)
    for pieces in kept:
        names = [piece.name for piece in pieces]
        assert len(names) == len(set(names)), "a file holds one piece of a tensor"


@given(tensors, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_no_share_is_further_than_a_row_from_the_mean(drawn, ranks):
    held = [LocalTensor(whole(number, shape, dtype)) for number, (shape, dtype, _) in enumerate(drawn)]
    kept = divide([held] * ranks)
    total = sum(item.box.nbytes for item in held)
    row = max((math.prod(item.box.shape[1:]) * ITEM_SIZES[item.box.dtype] for item in held), default=0)
    for pieces in kept:
        assert abs(sum(piece.nbytes for piece in pieces) - total / ranks) <= row + 1


def gpt2_345m() -> list[LocalTensor]:
    width, layers = 1024, 24
    sizes = {"embedding": (50304, width), "positions": (1024, width), "norm.weight": (width,), "norm.bias": (width,)}
    for layer in range(layers):
        for name, shape in {
            "qkv": (3 * width, width),
            "proj": (width, width),
            "fc1": (4 * width, width),
            "fc2": (width, 4 * width),
        }.items():
            sizes[f"{layer}.{name}.weight"] = shape
            sizes[f"{layer}.{name}.bias"] = shape[:1]
        for norm in ("n1", "n2"):
            sizes[f"{layer}.{norm}.weight"] = sizes[f"{layer}.{norm}.bias"] = (width,)
    return [
        LocalTensor(TensorSlice(f"{kind}{name}", "F32", shape, (0,) * len(shape), shape))
        for kind in ("model.", "optimizer.m.", "optimizer.v.")
        for name, shape in sizes.items()
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 64])
def test_the_345m_model_is_cut_evenly(ranks):
    shares = [sum(piece.nbytes for piece in pieces) for pieces in divide([gpt2_345m()] * ranks)]
    assert sum(shares) == 12 * 354_871_296
    assert max(shares) / (sum(shares) / ranks) <= 1.01


def test_what_one_rank_holds_stays_with_it_and_copies_share_the_rest():
    def shard(rank: int) -> LocalTensor:
        return LocalTensor(TensorSlice("sharded", "F32", (8, 4), (2 * rank, 0), (2, 4)))

    norm = LocalTensor(whole(0, (8,), "F32"))
    kept = divide([[shard(rank), norm] for rank in range(4)])
    for rank, pieces in enumerate(kept):
        assert shard(rank).box in pieces
        assert [piece.shape for piece in pieces if piece.name == "t00"] == [(2,)]


def test_the_plans_name_changes_with_every_part_of_it():
    held = [LocalTensor(whole(0, (8, 2), "F32")), LocalTensor(whole(1, (3,), "I64"))]
    names = {
        plan_hash(divide([held] * 2)),
        plan_hash(divide([held] * 3)),
        plan_hash(divide([held[:1]] * 2)),
        plan_hash(divide([[LocalTensor(whole(0, (8, 2), "F64")), held[1]]] * 2)),
        plan_hash(divide([[LocalTensor(whole(0, (8, 3), "F32")), held[1]]] * 2)),
    }
    assert len(names) == 5
    assert plan_hash(divide([held] * 2)) in names
