"""The run's whole state in CPU memory at every step: it outlives the trainer, is never torn, and is verified before it is used.

    from holdfast.snapshot import Snapshots

See `snapshots.py` for the loop and `restore.py` for the choice of the state to continue from. Below them: `memory/` (arenas,
slots, checksums, the copy), `ranks/` (status pages, collective decisions, stop signals) and `keeper/` (the process that
outlives the trainer, writes checkpoints and exchanges slots with peer nodes).
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
