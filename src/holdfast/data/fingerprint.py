"""A fingerprint of a .bin/.idx pair, independent of its path; it costs the same for a terabyte as for a megabyte.

It covers the sizes of both files and blocks spread evenly over them, first and last included. Equal data has an equal
fingerprint after a copy or a move; data made from other text or with another tokenizer has another one.
"""

import hashlib
import os
from pathlib import Path

from holdfast.data.indexed import pair_paths

BLOCKS, BLOCK_BYTES = 16, 1 << 16


def fingerprint(prefix: Path | str) -> str:
    digest = hashlib.sha256()
    for path in pair_paths(prefix):
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            last = max(0, size - BLOCK_BYTES)
            for place in sorted({last * number // (BLOCKS - 1) for number in range(BLOCKS)}):
                digest.update(os.pread(file.fileno(), BLOCK_BYTES, place))
    return digest.hexdigest()
