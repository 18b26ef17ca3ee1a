"""States that lead to NaN: counted in the run folder, quarantined after the second resume that met one.

The invariants: a resumed run is counted at most once, and only for a NaN within NEAR steps of the step it resumed from; what is
quarantined is the suspected state and what descends from it; nothing is deleted. So a bad snapshot does not keep the run in a
loop, and a NaN that is unrelated to the resumed state costs nothing.
"""

from pathlib import Path
from typing import Any

import orjson

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.system.atomic_files import publish_bytes, remove_temporaries, rename_into_place
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

LIMIT = 2
NEAR = 100
"""steps"""


class NanGuard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "quarantine.json"

    def resumed_from(self, step: int | None) -> None:
        """Records where the run continues; None for a new start. A state that was suspected before has been handled by now."""
        record = self._read()
        handled = step is None or self.suspected() is not None
        record |= {"resumed": step, "counted": False}
        self._write(record | {"suspect": None, "count": 0} if handled else record)

    def report(self, step: int) -> None:
        """Counts a step whose loss is NaN or infinite."""
        record = self._read()
        resumed, suspect = record["resumed"], record["suspect"]
        if resumed is None or record["counted"] or not 0 <= step - resumed <= NEAR:
            return
        if suspect is not None and suspect <= resumed <= suspect + NEAR:
            record["count"] += 1
        else:
            record |= {"suspect": resumed, "count": 1}
        self._write(record | {"counted": True})

    def suspected(self) -> int | None:
        """The step from which on states are avoided, because two resumed runs met a NaN near it; None if there is none."""
        record = self._read()
        return record["suspect"] if record["count"] >= LIMIT else None

    def quarantine(self) -> list[Path]:
        """Renames the suspected checkpoints on disk, so that no reader uses them; returns their new names."""
        suspect = self.suspected()
        return [
            _quarantine(path) for step, path in checkpoints_in(self._folder) if suspect is not None and step >= suspect
        ]

    def _read(self) -> dict[str, Any]:
        empty = {"resumed": None, "suspect": None, "count": 0, "counted": False}
        try:
            record = orjson.loads(self._path.read_bytes())
            return {name: record.get(name, default) for name, default in empty.items()}
        except (OSError, orjson.JSONDecodeError, AttributeError):
            return empty

    def _write(self, record: dict[str, Any]) -> None:
        try:
            remove_temporaries(self._path)
            publish_bytes(self._path, orjson.dumps(record))
        except (HoldfastError, OSError) as error:  # a full disk costs the count, not the run
            log(f"{self._path} was not written: {error}")


def _quarantine(path: Path) -> Path:
    """A step that was repeated and is suspected again gets a number."""
    names = (f"set-aside-{path.name}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 10_000))))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    rename_into_place(path, target)
    return target
