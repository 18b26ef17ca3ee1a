"""Holdfast: raw text to a generating language model, and it does not let go of the run.

The names below load their modules at first use, so that `import holdfast` costs next to nothing.
"""

import importlib
from typing import Any

_HOMES: dict[str, str] = {
    "convert": "holdfast.conversion.converting",
    "generate": "holdfast.generation.engine",
    "fetch": "holdfast.assets.fetching",
    "IndexedDataset": "holdfast.data.indexed",
    "preprocess": "holdfast.data.preprocess.run",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
