"""The run's whole state in CPU memory at every step: it outlives the trainer, is never torn, and is verified before it is used.

    from holdfast.snapshot import Snapshots

`snapshots.py` is the API of the training loop, `restore.py` chooses the state to continue from, `restore_memory.py` loads it from
memory, and `saves.py` requests checkpoints. Below them: `memory/` (arenas, slots, checksums, the copy), `ranks/` (claims, status
pages, collective decisions, stop signals) and `keeper/` (the process that outlives the trainer, writes checkpoints and exchanges
slots with peer nodes).
"""

from typing import TYPE_CHECKING

from holdfast.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast.snapshot.snapshots import Snapshots as Snapshots

__all__ = ["Snapshots"]
__getattr__ = lazy_names(__name__, {"Snapshots": "holdfast.snapshot.snapshots"})
