"""A rank's desk: one shared page where it says that it lives, where it stands, and reads what is asked of it.

`committed` outlives a start: a run that ever had a step common to all ranks must not start at step 0 unasked.

The invariant: every field has one writer (the rank; `stop_at` and `plan_at` the first rank of the node; `shipped` the keeper,
after the rank has cleared it), is one aligned 64-bit word that is loaded and stored whole, and means something at any instant.
(`struct` writes a word byte by byte: another process then reads values that were never stored.) A process is known by its
number and its start time, so that a reused number is not taken for it.
"""

import mmap
import os
import time
from pathlib import Path

from holdfast.system.descriptors import open_private
from holdfast.system.processes import process_alive, start_time

PAGE = 4096
RUNNING, FINISHED, STOPPED = 1, 2, 3
NOT_HELD = -1
SLOT_WORDS = 8
_FIELDS = {
    name: i
    for i, name in enumerate(
        [
            "process",
            "started",
            "status",
            "step",
            "ready",
            "heartbeat",
            "phase",
            "stop_wanted",
            "stop_at",
            "restarts",
            "skipped",
            "shipped",
            "given_up",
            "wants_plan",
            "plan_at",
            "committed",
            *(f"held_{slot}" for slot in range(SLOT_WORDS)),
        ]
    )
}
_WORDS, _WORDS_ROOM = 1024, 2048
PHASES = [
    "starting",
    "restoring",
    "training",
    "waiting for the copy",
    "starting a copy",
    "waiting for other ranks",
    "ended",
]


class RankStatus:
    """Word access by name: `desk["step"] = 7`. Times are whole nanoseconds of the monotonic clock, which all processes share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            # Reserved: on a full file system a store into a page that is not there yet ends the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, PAGE)
            self._map = mmap.mmap(descriptor, PAGE)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("q")

    def __getitem__(self, name: str) -> int:
        return self._words[_FIELDS[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._words[_FIELDS[name]] = value

    def set_held(self, slot: int, step: int) -> None:
        """The step that is READY in a slot of this rank, or NOT_HELD. Cleared before the slot is overwritten."""
        self[f"held_{slot}"] = step

    def held(self) -> set[int]:
        """The steps that this rank holds READY."""
        return {self[f"held_{slot}"] for slot in range(SLOT_WORDS)} - {NOT_HELD}

    def can_hold(self, step: int) -> bool:
        """Whether this rank holds the step or may still come to it. Ranks take steps in rising order."""
        passed = max(self["ready"], self["given_up"]) >= step  # read first: `held` is stored before `ready`
        return step in self.held() or not passed

    def claim(self) -> None:
        """This process takes the desk."""
        self["status"] = 0
        for name in ("stop_wanted", "stop_at", "step", "skipped", "shipped", "wants_plan", "plan_at"):
            self[name] = 0
        self.clear_held()
        self["restarts"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.set_error_text("")
        self["process"] = os.getpid()
        self["started"] = start_time(os.getpid())
        self["status"] = RUNNING
        self.beat(0)

    def clear_held(self) -> None:
        self["ready"] = self["given_up"] = -1
        for slot in range(SLOT_WORDS):
            self.set_held(slot, NOT_HELD)

    def beat(self, phase: int) -> None:
        self["phase"] = phase
        self["heartbeat"] = time.monotonic_ns()

    @property
    def age(self) -> float:
        """Seconds since the rank last gave a sign of life."""
        return (time.monotonic_ns() - self["heartbeat"]) / 1e9

    @property
    def where(self) -> str:
        phase = self["phase"]
        return PHASES[phase] if 0 <= phase < len(PHASES) else str(phase)

    def owner_alive(self) -> bool:
        """The process that took this desk is alive and has not left."""
        return self["status"] == RUNNING and process_alive(self["process"], self["started"])

    def set_error_text(self, text: str) -> None:
        content = text.encode()[: _WORDS_ROOM - 1]
        self._map[_WORDS : _WORDS + _WORDS_ROOM] = content.ljust(_WORDS_ROOM, b"\0")

    @property
    def error_text(self) -> str:
        return bytes(self._map[_WORDS : _WORDS + _WORDS_ROOM]).rstrip(b"\0").decode(errors="replace")


def status_page_name(rank: int) -> str:
    return f"rank-{rank:05d}.status"
