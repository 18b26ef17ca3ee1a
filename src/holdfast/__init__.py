"""Holdfast: raw text to a generating language model, and it does not let go of the run.

The names below load their modules at first use, so that `import holdfast` costs next to nothing.
"""

from holdfast.system.lazy_names import lazy_names

_HOMES: dict[str, str] = {
    "convert": "holdfast.conversion.converting",
    "generate": "holdfast.generation.engine",
    "fetch": "holdfast.assets.fetching",
    "IndexedDataset": "holdfast.data.indexed",
    "preprocess": "holdfast.data.preprocess.run",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
