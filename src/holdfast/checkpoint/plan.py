"""The plan of a checkpoint or snapshot: which rank keeps which slices, from what every rank holds. Pure functions; no torch.

Ranks that hold the same slice of a tensor are its replicas. All slices with the same replicas are concatenated in the order of
their names, and the i-th of n replicas keeps the i-th n-th of the result, cut on rows. So the balance is within one row for any
n, a replica keeps one contiguous row range of a tensor, and what only one rank holds stays with it. The invariant: the slices
that one replica set keeps cover every element of every tensor of that replica set exactly once.

A replica set is a set of ranks that divide replicated tensors among themselves: all ranks by default; the ranks of one node if
every node is to be complete. Elements that several replica sets keep are persisted from the first.
"""

import bisect
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.layout import TensorSlice


@dataclass(frozen=True)
class LocalTensor:
    """The slice of a tensor that a rank holds. One that is not `divisible` stays whole, with its first replica."""

    box: TensorSlice
    divisible: bool = True


def divide(
    held: Sequence[Sequence[LocalTensor]], replica_sets: Sequence[Hashable] | None = None
) -> list[list[TensorSlice]]:
    """The slices that each rank keeps. `held[r]` is what rank r holds, `replica_sets[r]` the replica set it belongs to."""
    replicas: dict[tuple[Hashable, LocalTensor], list[int]] = defaultdict(list)
    for rank, items in enumerate(held):
        replica_set = replica_sets[rank] if replica_sets is not None else None
        for item in items:
            if math.prod(item.box.shape):
                replicas[replica_set, item].append(rank)
    groups: dict[tuple[int, ...], list[LocalTensor]] = defaultdict(list)
    for (_, item), ranks in replicas.items():
        groups[tuple(ranks)].append(item)
    kept: list[list[TensorSlice]] = [[] for _ in held]
    for ranks_of_group, shared in sorted(groups.items()):
        _divide_among(ranks_of_group, shared, kept)
    return kept


def _divide_among(ranks: tuple[int, ...], items: list[LocalTensor], kept: list[list[TensorSlice]]) -> None:
    kept[ranks[0]] += [item.box for item in items if not item.divisible]
    boxes = sorted((item.box for item in items if item.divisible), key=lambda box: (box.name, box.offset))
    ends = list(itertools.accumulate(box.nbytes for box in boxes))
    if not ends:
        return
    cuts = [_cut(boxes, ends, ends[-1] * i // len(ranks)) for i in range(len(ranks))] + [(len(boxes), 0)]
    for rank, begin, end in zip(ranks, cuts, cuts[1:], strict=False):
        for index in range(begin[0], min(end[0] + 1, len(boxes))):
            box = boxes[index]
            first = begin[1] if index == begin[0] else 0
            last = end[1] if index == end[0] else _rows(box)
            if last > first:
                kept[rank].append(_row_range(box, first, last))


def _cut(boxes: list[TensorSlice], ends: list[int], position: int) -> tuple[int, int]:
    """The slice that holds byte `position` of all slices together, and the row nearest to it."""
    index = min(bisect.bisect_right(ends, position), len(boxes) - 1)
    box = boxes[index]
    row_bytes = box.nbytes // _rows(box)
    return index, (position - (ends[index] - box.nbytes) + row_bytes // 2) // row_bytes


def _rows(box: TensorSlice) -> int:
    return box.shape[0] if box.shape else 1


def _row_range(box: TensorSlice, first: int, last: int) -> TensorSlice:
    if not box.shape:
        return box
    offset = (box.offset[0] + first, *box.offset[1:])
    return TensorSlice(box.name, box.dtype, box.global_shape, offset, (last - first, *box.shape[1:]))


def ranks_to_persist(kept: Sequence[Sequence[TensorSlice]]) -> list[int]:
    """The ranks whose slices make up the state: a rank that only repeats what earlier ones have is left out."""
    seen: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    chosen = []
    for rank, pieces in enumerate(kept):
        fresh = False
        for piece in pieces:
            covered = sum(math.prod(overlap(piece.offset, piece.shape, *box)[1]) for box in seen[piece.name])
            fresh |= covered < math.prod(piece.shape)
        if fresh:
            chosen.append(rank)
            for piece in pieces:
                seen[piece.name].append((piece.offset, piece.shape))
    return chosen


def complete_sets(kept: Sequence[Sequence[TensorSlice]], replica_sets: Sequence[Hashable]) -> list[list[int]]:
    """Sets of ranks, each of which holds the whole state: those to persist, and every replica set that is complete."""
    found = [ranks_to_persist(kept)]
    elements = {piece.name: math.prod(piece.global_shape) for pieces in kept for piece in pieces}
    for replica_set in dict.fromkeys(replica_sets):
        ranks = [rank for rank, other in enumerate(replica_sets) if other == replica_set]
        held: dict[str, int] = defaultdict(int)
        for rank in ranks:
            for piece in kept[rank]:
                held[piece.name] += math.prod(piece.shape)
        if dict(held) == elements and ranks != found[0]:
            found.append(ranks)
    return found


def overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The intersection of two boxes, as offset and shape; an empty one has a zero in its shape."""
    begins = tuple(max(a, b) for a, b in zip(offset, other_offset, strict=True))
    ends = (min(a + s, b + t) for a, s, b, t in zip(offset, shape, other_offset, other_shape, strict=True))
    return begins, tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True))


def plan_hash(kept: Sequence[Sequence[TensorSlice]]) -> str:
    """A name of the plan: equal for equal tensors, layouts and ranks."""
    digest = hashlib.sha256()
    for pieces in kept:
        table = sorted((p.name, p.dtype, p.global_shape, p.offset, p.shape) for p in pieces)
        digest.update(json.dumps(table).encode())
    return digest.hexdigest()[:32]


def encode_held(held: Iterable[LocalTensor]) -> list[Any]:
    """As JSON, to gather it from all ranks."""
    boxes = ((item.box, item.divisible) for item in held)
    return [[box.name, box.dtype, box.global_shape, box.offset, box.shape, divisible] for box, divisible in boxes]


def decode_held(encoded: Sequence[Sequence[Any]]) -> list[LocalTensor]:
    return [
        LocalTensor(TensorSlice(name, dtype, tuple(whole), tuple(offset), tuple(shape)), divisible)
        for name, dtype, whole, offset, shape, divisible in encoded
    ]
