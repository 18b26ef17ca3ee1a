"""Limits on reading one source, over all its files, and the checksums that are still to be compared.

The invariant: an honest source needs a fraction of these limits; a hostile one is refused within them, before it has taken
512 MB or ten seconds.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.conversion.files.zips import Region

MAX_OPCODES = 3_000_000
MAX_PICKLE_BYTES = 64 << 20
MAX_MEMBERS = 200_000
MAX_FILES = 4096
MAX_TENSORS = 1 << 16


@dataclass
class Budget:
    """What is left for this source; readers subtract from it and refuse a source that exceeds it."""

    opcodes: int = MAX_OPCODES
    pickle_bytes: int = MAX_PICKLE_BYTES
    members: int = MAX_MEMBERS
    """Of all zips."""
    unchecked: dict[str, tuple["Region", int]] = field(default_factory=dict)
    """Zip members in use and the CRC-32 that the zip declares for them; the writer compares them while it streams."""
