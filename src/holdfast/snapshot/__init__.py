"""The run's whole state in CPU memory at every step: it outlives the trainer, is never torn, and is verified before it is used.

    from holdfast.snapshot import Snapshots

See `snapshots.py` for the loop. Files from here down: `place` (where), `arena` (the memory), `desk` (a rank's control
page), `digest`, `copying` (the copy), `holder` (what, into which slot), `team` (what all ranks have), `persisting`
(memory → disk), `keeper` (the process), `peers` (other nodes), `resume` (which state to continue from).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.snapshot.snapshots import Snapshots as Snapshots

__all__ = ["Snapshots"]


def __getattr__(name: str) -> Any:
    if name == "Snapshots":
        from holdfast.snapshot.snapshots import Snapshots

        return Snapshots
    raise AttributeError(f"module 'holdfast.snapshot' has no attribute '{name}'")
