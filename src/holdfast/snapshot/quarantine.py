"""States that lead to NaN: counted in the run folder, set aside after the second time.

The invariant: what is counted is the state that a run was resumed from, and what that run made of it counts with it; so a bad
snapshot does not catch the run in a loop, and a single NaN costs nothing but the restart.
"""

import os
from pathlib import Path
from typing import Any

import orjson

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.errors import HoldfastError
from holdfast.progress import say
from holdfast.publish import publish_bytes

LIMIT = 2
NEAR = 100
"""steps: a NaN after a resume that lies no further beyond the suspected state is counted against that state"""


class Quarantine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "quarantine.json"

    def resumed_from(self, step: int) -> None:
        """Notes where the run goes on. States that were set aside before are no longer of interest."""
        record = self._read()
        suspect = None if self.suspected() is not None else record["suspect"]
        self._write({"resumed": step, "suspect": suspect, "count": record["count"] if suspect is not None else 0})

    def count(self) -> None:
        """The run that was resumed has met a NaN."""
        record = self._read()
        resumed, suspect = record["resumed"], record["suspect"]
        if resumed is None:
            return
        if suspect is not None and suspect <= resumed <= suspect + NEAR:
            record["count"] += 1
        else:
            record |= {"suspect": resumed, "count": 1}
        self._write(record)

    def suspected(self) -> int | None:
        """The step from which on states are not to be used: they have led to NaN twice."""
        record = self._read()
        return record["suspect"] if record["count"] >= LIMIT else None

    def set_aside(self) -> list[Path]:
        """Renames the checkpoints on disk that are suspected, so that nobody takes them for good ones; nothing is removed."""
        suspect = self.suspected()
        moved = []
        for step, path in checkpoints_in(self._folder) if suspect is not None else ():
            if suspect is not None and step >= suspect:
                target = path.with_name(f"set-aside-{path.name}")
                os.rename(path, target)
                moved.append(target)
        return moved

    def _read(self) -> dict[str, Any]:
        try:
            record = orjson.loads(self._path.read_bytes())
            return {"resumed": record["resumed"], "suspect": record["suspect"], "count": int(record["count"])}
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError):
            return {"resumed": None, "suspect": None, "count": 0}

    def _write(self, record: dict[str, Any]) -> None:
        try:
            publish_bytes(self._path, orjson.dumps(record))
        except HoldfastError as error:  # a full disk costs the count, not the run
            say(str(error))
