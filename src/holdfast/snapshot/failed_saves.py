"""Failed saves on their way from the keeper, which has no terminal, to the first rank of the node, which reports them.

The keeper writes one record in memory, where a full disk does not matter, and removes it after the next successful write.
"""

from pathlib import Path

from holdfast.progress import say
from holdfast.snapshot.place import Place, read_json, write_json


def _record(place: Place) -> Path:
    return place.path / "failed_save.json"


def record_failed_save(place: Place, step: int | None, reason: str, retry_seconds: float) -> None:
    write_json(_record(place), {"step": step, "reason": reason, "retry_seconds": retry_seconds})


def clear_failed_save(place: Place) -> None:
    _record(place).unlink(missing_ok=True)


class FailedSaveReport:
    """Prints each failed save once, and the success that follows it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._shown: str | None = None

    def update(self) -> None:
        found = read_json(_record(self._place))
        if found is None:
            if self._shown is not None and self._place.path.exists():
                say(f"{self._shown} is on disk now")
            self._shown = None
            return
        what = "the newest step" if found["step"] is None else f"step {found['step']}"
        if what != self._shown:
            self._shown = what
            say(
                f"warning: {what} could not be saved: {found['reason']}. The state stays in memory; next try in "
                f"{found['retry_seconds']:.0f} s"
            )
