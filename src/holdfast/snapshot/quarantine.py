"""Snapshots that lead to NaN: counted in the run folder, set aside after the second time.

The invariant: what is counted is the state that a run was resumed from, so a bug of the model does not cost a good snapshot more
than one older tier, and a bad snapshot does not catch the run in a loop.
"""

from pathlib import Path
from typing import Any

import orjson

from holdfast.publish import publish_bytes

LIMIT = 2


class Quarantine:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "quarantine.json"

    def resumed_from(self, source: str, step: int) -> None:
        record = self._read()
        record["resumed"] = _key(source, step)
        self._write(record)

    def count(self) -> None:
        record = self._read()
        if key := record.get("resumed"):
            record["counts"][key] = record["counts"].get(key, 0) + 1
            self._write(record)

    def holds(self, source: str, step: int) -> bool:
        """This state has led to NaN twice."""
        return bool(self._read()["counts"].get(_key(source, step), 0) >= LIMIT)

    def _read(self) -> dict[str, Any]:
        try:
            record = orjson.loads(self._path.read_bytes())
            return {"resumed": record["resumed"], "counts": dict(record["counts"])}
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
            return {"resumed": None, "counts": {}}

    def _write(self, record: dict[str, Any]) -> None:
        publish_bytes(self._path, orjson.dumps(record))


def _key(source: str, step: int) -> str:
    """Memory and peer copies are the same bytes; a checkpoint on disk may be of another time."""
    return f"{'disk' if source == 'disk' else 'memory'}:{step}"
