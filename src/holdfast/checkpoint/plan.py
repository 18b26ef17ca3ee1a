"""Who keeps what: every rank's tensors in, every rank's pieces out. A pure function; no torch.

Ranks that hold the same box of a tensor are its copies. All boxes with the same copies are strung together in the order of their
names, and the i-th of n copies keeps the i-th n-th of that string, cut on rows. So balance is within one row for any n,
one copy keeps one contiguous row range of a tensor, and what only one rank holds stays with it. The invariant: the
pieces of one replica set cover every element of every tensor of that replica set exactly once.

A replica set is a set of ranks that divide the work among themselves: all of them by default; the ranks of one node where
every node is to be complete. Elements that several replica_sets keep are persisted from the first.
"""

import bisect
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.layout import ITEM_SIZES, TensorSlice


@dataclass(frozen=True)
class LocalTensor:
    """A box that a rank holds. What is not `divisible` stays whole, with the first of its copies."""

    box: TensorSlice
    divisible: bool = True


def divide(
    held: Sequence[Sequence[LocalTensor]], replica_sets: Sequence[Hashable] | None = None
) -> list[list[TensorSlice]]:
    """For each rank the pieces it keeps. `held[r]` is what rank r holds, `replica_sets[r]` the replica set it belongs to."""
    copies: dict[tuple[Hashable, LocalTensor], list[int]] = defaultdict(list)
    for rank, items in enumerate(held):
        replica_set = replica_sets[rank] if replica_sets is not None else None
        for item in items:
            if math.prod(item.box.shape):
                copies[replica_set, item].append(rank)
    groups: dict[tuple[int, ...], list[LocalTensor]] = defaultdict(list)
    for (_, item), ranks in copies.items():
        groups[tuple(ranks)].append(item)
    kept: list[list[TensorSlice]] = [[] for _ in held]
    for holders, items_of_them in sorted(groups.items()):
        _divide_among(holders, items_of_them, kept)
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
    """The box in which byte `position` of the string lies, and the row nearest to it."""
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
    """The ranks whose pieces make up the state once: a rank that only repeats what earlier ones have is left out."""
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
    """Sets of ranks of which each holds the whole state: those to persist, and every replica set that needs no other."""
    found = [ranks_to_persist(kept)]
    elements = {piece.name: math.prod(piece.global_shape) for pieces in kept for piece in pieces}
    for replica_set in dict.fromkeys(replica_sets):
        ranks = [rank for rank, its in enumerate(replica_sets) if its == replica_set]
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
    """The box that two boxes share, as offset and shape; an empty shape has a zero in it."""
    begins = tuple(max(a, b) for a, b in zip(offset, other_offset, strict=True))
    ends = (min(a + s, b + t) for a, s, b, t in zip(offset, shape, other_offset, other_shape, strict=True))
    return begins, tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True))


def plan_hash(kept: Sequence[Sequence[TensorSlice]]) -> str:
    """Names what is kept by whom: equal for equal tensors, layouts and ranks."""
    digest = hashlib.sha256()
    for pieces in kept:
        table = sorted((p.name, p.dtype, p.global_shape, p.offset, p.shape) for p in pieces)
        digest.update(json.dumps(table).encode())
    return digest.hexdigest()[:32]


def tensors_of(kept: Sequence[Sequence[TensorSlice]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor's dtype and global shape."""
    return {piece.name: (piece.dtype, piece.global_shape) for pieces in kept for piece in pieces}


def bytes_of(pieces: Sequence[TensorSlice]) -> int:
    return sum(math.prod(piece.shape) * ITEM_SIZES[piece.dtype] for piece in pieces)
