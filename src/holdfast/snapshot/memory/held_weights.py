"""The model's weights in a run's newest memory snapshot, copied while the run may go on training. No torch.

The invariant: bytes are used only if their slot was the same before and after the copy and their row sums match. Nothing is
locked or pinned: a reader never holds up the training.
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.checkpoint.layout import NUMPY_TYPES, TensorSlice
from holdfast.checkpoint.reader import Bytes, Tensors
from holdfast.snapshot.memory.arena import Arena
from holdfast.snapshot.memory.checksum import digest_starts, rows_in, sum_rows
from holdfast.snapshot.memory.ready_slot import OvertakenError, ReadySlot
from holdfast.snapshot.memory.run_memory import MEMORY, opened_arenas, run_memories
from holdfast.snapshot.memory.slot import READY, DamagedError
from holdfast.system.progress import log

MODEL = "model."
# Copies that training may overtake before the checkpoint on disk is used instead.
ATTEMPTS = 20


class HeldWeights(Tensors):
    """The weights of one step and what the snapshot holds beside them, by the names that a checkpoint's reader uses."""

    def __init__(self, folder: Path, step: int, small: dict[str, Any]) -> None:
        super().__init__(f"the snapshot of step {step} in memory", {})
        self.path = folder / "checkpoints" / f"step-{step:08d}"
        """Where the keeper would write it."""
        self.step, self.shared, self.world = step, small["shared"], small["world"]
        self.padded_rows: dict[str, int] = small["padded_rows"]

    def drop_pages(self) -> None:
        """Nothing to drop: the weights are copies."""


class CopiedPiece:
    """A piece of a tensor, copied out of a slot; `view` takes positions in the slot."""

    types: Mapping[str, Any] = NUMPY_TYPES

    def __init__(self, content: Bytes, start: int) -> None:
        self.content, self._start = content, start

    def view(self, begin: int, end: int) -> Bytes:
        return self.content[begin - self._start : end - self._start]


def newest_weights(folder: Path, memory: Path | str = MEMORY, newer_than: int = -1) -> HeldWeights | None:
    """The newest whole snapshot of a run folder that this host holds; None if it is not newer than a step, or cannot be read."""
    real = folder.resolve()
    found = [run_memory for run_memory in run_memories(memory) if run_memory.folder == real]
    for _ in range(ATTEMPTS if found else 0):
        paths = [path for run_memory in found for path in (*run_memory.arenas(), *run_memory.peer_arenas())]
        with ExitStack() as stack:
            opened = (stack.enter_context(opened_arenas(paths, key)) for key in {one.key for one in found})
            try:
                return _copy_newest(folder, [arena for arenas in opened for arena in arenas], newer_than)
            except OvertakenError:
                continue
            except DamagedError as error:
                log(f"{error}; the snapshot in memory is not used")
                return None
    return None


def _copy_newest(folder: Path, arenas: list[Arena], newer_than: int) -> HeldWeights | None:
    held: dict[tuple[int, int], dict[int, ReadySlot]] = defaultdict(dict)
    for arena in arenas:
        for index, header in enumerate(arena.headers()):
            if header.state == READY:
                held[arena.generation, header.step].setdefault(arena.rank, ReadySlot(arena, index, header))
    for (_, step), slots in sorted(held.items(), reverse=True, key=lambda entry: entry[0]):
        small = next(iter(slots.values())).small
        ranks = next((ranks for ranks in small["complete"] if set(ranks) <= set(slots)), None)
        if ranks is None:
            continue
        if step <= newer_than:
            return None
        weights = HeldWeights(folder, step, small)
        for rank in ranks:
            _add(weights, slots[rank])
        return weights
    return None


def _add(weights: HeldWeights, ready: ReadySlot) -> None:
    """Copies the weights of one slot and compares them with their row sums."""
    slot, header = ready.slot, ready.header
    try:
        layout = slot.layout(header)
    except DamagedError:
        ready.check_unchanged()
        raise
    starts, total = digest_starts(layout)
    sums = slot.digest[:total].copy()
    copies: list[tuple[TensorSlice, int, NDArray[np.int64], CopiedPiece]] = []
    for piece, start, first in zip(layout.pieces, layout.starts, starts, strict=True):
        if piece.name.startswith(MODEL):
            expected = sums[first : first + rows_in(piece.nbytes)]
            copy = CopiedPiece(slot.payload[start : start + piece.nbytes].copy(), start)
            copies.append((piece, start, expected, copy))
    ready.check_unchanged()
    if xxhash.xxh3_64_intdigest(sums.data) != header.digest_hash:
        raise DamagedError(f"{slot.origin}: the row sums of step {header.step} do not match their checksum")
    for piece, start, expected, copy in copies:
        found = np.empty_like(expected)
        sum_rows(copy.content, found)
        if not np.array_equal(found, expected):
            raise DamagedError(f"{slot.origin}: {piece.name} of step {header.step} is damaged")
        weights.tensors[piece.name] = (piece.dtype, tuple(piece.global_shape))
        weights.add(piece, start, copy)
