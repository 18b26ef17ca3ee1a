"""What the journal of a `preprocess` run says: a state after each unit that was appended, and the parts that wait for their turn.

The invariant: the files of the run, cut to the sizes of any state in a History, hold exactly the units before its `next_unit`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from holdfast.data.preprocess.worker import Part
from holdfast.system.journal import read_journal
from holdfast.system.processes import boot_id


@dataclass
class KeyState:
    """How far the files of one key have grown."""

    bytes: int = 0
    sequences: int = 0
    documents: int = 0


@dataclass
class State:
    """Where the run stands, after the units before `next_unit`."""

    next_unit: int = 0
    keys: list[KeyState] = field(default_factory=list)
    file: int = -1
    line: int = 0
    offset: int = 0
    """Lines and bytes of the current file that are behind us."""
    lines: int = 0
    size: int = 0
    bad: int = 0
    bad_bytes: int = 0
    digest: str = ""
    """Digest of the current file's units' digests."""
    seconds: float = 0.0
    complete: bool = False
    boot: str = ""
    synced: bool = False

    @property
    def documents(self) -> int:
        return self.keys[0].documents


def chained(digest: str, following: str) -> str:
    """The digest of a file's units so far, and the digest of one more."""
    return xxhash.xxh3_128_hexdigest((digest + following).encode())


@dataclass
class History:
    states: list[State] = field(default_factory=list)
    """In the order of `next_unit`; after a reboot only those that were synced."""
    parts: dict[int, Part] = field(default_factory=dict)
    """Finished units that are not appended yet."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of each input file that is appended to its end."""

    @property
    def last_file(self) -> int:
        """The last input file of which anything was done; -1 without any."""
        last = self.states[-1].file if self.states else -1
        return max([last, *(part.file for part in self.parts.values())])

    def only(self, keeps_state: Callable[[State], bool], keeps_part: Callable[[Part], bool]) -> "History":
        """The history with these states and parts alone."""
        states = [state for state in self.states if keeps_state(state)]
        file = states[-1].file if states else -1
        parts = {number: part for number, part in self.parts.items() if keeps_part(part)}
        return History(states, parts, {number: digest for number, digest in self.digests.items() if number < file})

    def as_journal(self) -> bytes:
        """The journal that this history would be read from."""
        records: list[dict[str, Any]] = [{"file": number, "digest": digest} for number, digest in self.digests.items()]
        records += [{"state": asdict(state)} for state in self.states]
        records += [{"part": asdict(part)} for part in self.parts.values()]
        return b"".join(orjson.dumps(record) + b"\n" for record in records)


def read_history(journal: Path) -> History:
    history, rebooted = History(), False
    for record in read_journal(journal):
        if "part" in record:
            part = Part(**record["part"])
            part.bad = [(line, offset, reason) for line, offset, reason in part.bad]
            history.parts[part.unit] = part
        elif "digest" in record:
            history.digests[record["file"]] = record["digest"]
        elif "state" in record:
            state = State(**record["state"])
            state.keys = [KeyState(**key) for key in record["state"]["keys"]]
            rebooted = rebooted or state.boot != boot_id()
            if not rebooted or state.synced:
                history.states.append(state)
    after = history.states[-1].next_unit if history.states else 0
    history.parts = {} if rebooted else {number: part for number, part in history.parts.items() if number >= after}
    return history
