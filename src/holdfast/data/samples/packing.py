"""Best-fit packing: whole documents into samples of equal size, with as little padding as the rule gives.

Documents are taken from the longest to the shortest, and each goes into the sample with the least room that it fits into, or
into a new one (best-fit decreasing). Samples with the same room are interchangeable, and documents of one length that follow each
other fill one sample after the other: so the work is done per length and not per document. An interval of samples whose room is
at least the length keeps the remainder of a division by it, less than half of the room. The number of steps therefore grows
with capacity × log(capacity), whatever the number of documents.
"""

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.signedinteger]


class _OpenSamples:
    """Samples that have room left, as intervals of their numbers, by room."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._intervals: dict[int, list[tuple[int, int]]] = {}

    def put(self, room: int, first: int, count: int) -> None:
        if not (room and count):
            return
        if room not in self._intervals:
            insort(self._rooms, room)
            self._intervals[room] = []
        self._intervals[room].append((first, count))

    def take(self, length: int) -> tuple[int, int, int] | None:
        """(room, first, count) of an interval of samples with the least room for `length`; None if there is none."""
        place = bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return None
        room = self._rooms[place]
        first, count = self._intervals[room].pop()
        if not self._intervals[room]:
            del self._rooms[place], self._intervals[room]
        return room, first, count


def pack(counts: npt.NDArray[np.int64], capacity: int) -> tuple[Index, int]:
    """The sample of each piece, pieces sorted from long to short, and the number of samples.

    `counts[n]` is the number of pieces of n tokens, up to `capacity`, the size of a sample.
    """
    pieces = int(counts[1:].sum())
    sample_of: Index = np.empty(pieces, np.int32 if pieces <= np.iinfo(np.int32).max else np.int64)
    done = samples = 0
    opened = _OpenSamples()
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left:
            found = opened.take(length)
            # Without room anywhere: as many new samples as the rest of this length needs.
            room, first, count = found or (capacity, samples, -(-left // (capacity // length)))
            samples += 0 if found else count
            each = room // length
            full = min(count, left // each)
            sample_of[done : done + full * each] = np.repeat(np.arange(first, first + full), each)
            opened.put(room - each * length, first, full)
            done, left = done + full * each, left - full * each
            first, count = first + full, count - full
            if count and left:  # fewer than a sample takes
                sample_of[done : done + left] = first
                opened.put(room - left * length, first, 1)
                done, left, first, count = done + left, 0, first + 1, count - 1
            opened.put(room, first, count)
    assert done == pieces
    return sample_of, samples


def cut_documents(
    lengths: npt.NDArray[np.int32], documents: range, capacity: int
) -> tuple[npt.NDArray[np.int32], Index]:
    """Pieces of at most `capacity` tokens: [pieces, 2] (document, first token) and their lengths. Empty documents have none."""
    own = np.maximum(lengths[documents.start : documents.stop], 0).astype(np.int64)
    parts = -(-own // capacity)
    pieces = np.empty((int(parts.sum()), 2), np.int32)
    pieces[:, 0] = np.repeat(np.arange(documents.start, documents.stop, dtype=np.int32), parts)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(parts) - parts, parts)
    pieces[:, 1] = number * capacity
    sizes = np.minimum(np.repeat(own, parts) - number * capacity, capacity).astype(np.int32)
    return pieces, sizes
