"""A rank's status page: one shared page of words that shows whether the rank is alive, how far it is and what it is asked.

`committed` survives a restart: a run that ever had a step common to all ranks must not start at step 0 by itself. So does
`claims`, the number of processes that have owned the page.

The invariant: every field has one writer (the rank; `stop_at`, `plan_at` and `interval` the first rank of the node; `shipped`
the keeper, after the rank has cleared it), is one aligned 64-bit word that is loaded and stored whole, and is always valid.
(`struct` writes a word byte by byte: another process then reads values that were never stored.) A process is identified by its
number and its start time, so that a reused number is not mistaken for it.
"""

import mmap
import os
import time
from enum import IntEnum
from pathlib import Path

from holdfast.system.descriptors import open_private
from holdfast.system.processes import process_alive, start_time

PAGE = 4096
RUNNING, FINISHED, STOPPED = 1, 2, 3
NOT_HELD = -1
SLOT_WORDS = 8
_NAMES = (
    "process started status step ready heartbeat phase stop_requested stop_at restarts skipped shipped skipped_step "
    "plan_requested plan_at committed"
).split()
_HELD = [f"held_{slot}" for slot in range(SLOT_WORDS)]
_FIELDS = {name: index for index, name in enumerate([*_NAMES, *_HELD, "interval_wanted", "interval", "claims"])}
_ERROR_TEXT, _ERROR_BYTES = 1024, 2048


class Phase(IntEnum):
    """What a rank is doing. Users see the names in lower case, with spaces."""

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    WAITING_FOR_THE_COPY = 3
    STARTING_A_COPY = 4
    WAITING_FOR_OTHER_RANKS = 5
    ENDED = 6


class RankStatus:
    """Word access by name: `page["step"] = 7`. Times are whole nanoseconds of the monotonic clock, which all processes share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        descriptor = open_private(self.path, os.O_RDWR | os.O_CREAT)
        try:
            # Reserved: on a full file system a store into a page that is not there yet ends the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, PAGE)
            self._map = mmap.mmap(descriptor, PAGE)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("q")

    def renew(self) -> None:
        """Gives the page a file of the same content again, after something removed it."""
        content = bytes(self._map)
        self._open()
        self._map[:] = content

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
        """Whether this rank holds the step or may still come to hold it. Ranks take steps in rising order."""
        passed = max(self["ready"], self["skipped_step"]) >= step  # read first: `held` is stored before `ready`
        return step in self.held() or not passed

    def claim(self) -> None:
        """Makes this process the owner of the page. The caller holds the memory's lock."""
        self["claims"] += 1
        self["status"] = 0
        for name in (
            "stop_requested",
            "stop_at",
            "step",
            "skipped",
            "shipped",
            "plan_requested",
            "plan_at",
            "interval_wanted",
            "interval",
        ):
            self[name] = 0
        self.clear_held()
        self["restarts"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.set_error_text("")
        self["process"] = os.getpid()
        self["started"] = start_time(os.getpid())
        self["status"] = RUNNING
        self.beat(Phase.STARTING)

    def clear_held(self) -> None:
        self["ready"] = self["skipped_step"] = -1
        for slot in range(SLOT_WORDS):
            self.set_held(slot, NOT_HELD)

    def beat(self, phase: int) -> None:
        self["phase"] = phase
        self["heartbeat"] = time.monotonic_ns()

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat."""
        return (time.monotonic_ns() - self["heartbeat"]) / 1e9

    @property
    def phase_name(self) -> str:
        phase = self["phase"]
        return Phase(phase).name.lower().replace("_", " ") if phase in set(Phase) else str(phase)

    def owner_alive(self) -> bool:
        """Whether the process that claimed this page is alive and has not ended its run."""
        return self["status"] == RUNNING and process_alive(self["process"], self["started"])

    def set_error_text(self, text: str) -> None:
        content = text.encode()[: _ERROR_BYTES - 1]
        self._map[_ERROR_TEXT : _ERROR_TEXT + _ERROR_BYTES] = content.ljust(_ERROR_BYTES, b"\0")

    @property
    def error_text(self) -> str:
        return bytes(self._map[_ERROR_TEXT : _ERROR_TEXT + _ERROR_BYTES]).rstrip(b"\0").decode(errors="replace")


def status_page_name(rank: int) -> str:
    return f"rank-{rank:05d}.status"
