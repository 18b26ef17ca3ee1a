"""Which checkpoints of a run may be removed. No torch.

The invariant: only a checkpoint that verifies (manifest, sizes, checksums) counts as kept; nothing is removed before
`keep_last` of those exist; what was just written and what the run resumed from are never removed.
"""

import functools
import os
from collections.abc import Collection
from pathlib import Path

from holdfast.checkpoint.folder import checkpoints_in, new_temporary
from holdfast.checkpoint.manifest import FILE_NAME
from holdfast.checkpoint.reader import open_checkpoint
from holdfast.system.atomic_files import remove_folder
from holdfast.system.errors import HoldfastError


def retain(
    folder: Path,
    keep_last: int | None,
    keep_every: int | None,
    protect: Collection[int] = (),
    written: Collection[int] = (),
) -> list[Path]:
    """Removes all but the newest `keep_last` sound checkpoints, those whose step `keep_every` divides, and `protect`.

    None keeps all. `written`: steps that this process wrote and therefore does not read again.
    """
    found = checkpoints_in(folder)
    if keep_last is None or len(found) <= max(1, keep_last):
        return []
    kept: set[int] = set()
    for step, path in reversed(found):
        if len(kept) < max(1, keep_last) and (step in written or _is_sound(path)):
            kept.add(step)
    if len(kept) < max(1, keep_last):
        return []
    removed = []
    for step, path in found:
        if step in kept or step in protect or (keep_every and step % keep_every == 0):
            continue
        remove_folder(path, new_temporary(folder, step))
        removed.append(path)
    return removed


def _is_sound(path: Path) -> bool:
    try:
        found = os.stat(path / FILE_NAME)
    except OSError:
        return False
    return _verifies(path, found.st_ino, found.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _verifies(path: Path, *identity: int) -> bool:
    """Compares every byte with its checksum, once per process and checkpoint; `identity` is that of its manifest file."""
    try:
        with open_checkpoint(path) as checkpoint:
            checkpoint.verify()
    except (HoldfastError, OSError, ValueError, TypeError, KeyError):
        return False
    return True
