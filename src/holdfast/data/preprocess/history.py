"""What an earlier call of a run has done, read from its journal: a state per appended unit, and the parts not appended yet.

The invariant: the files of the run, cut to the sizes of any state in a History, hold exactly the units before its `next_unit`.

When the user has changed an input file, for example to fix a bad line, `keep_unchanged` keeps what is still valid. A part of a
unit of lines is a function of the unit's bytes, and the journal holds a digest of them. So the units of the changed file are cut
and read again, which is far cheaper than tokenizing them, and those with the same bytes are kept. What is kept is what a fresh
run over the changed input would compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from holdfast.data.preprocess.worker import EncodedPart
from holdfast.data.sources import InputFile, Unit, source_named
from holdfast.data.sources.lines import unit_lines
from holdfast.system.journal import read_journal
from holdfast.system.processes import boot_id
from holdfast.system.progress import Bar, count_of, log, progress

# Sources whose units hold the lines of `unit_lines`, and nothing else decides what becomes of them.
LINE_SOURCES = ("jsonl", "passages")


@dataclass
class KeyState:
    """How far the files of one key have grown."""

    bytes: int = 0
    sequences: int = 0
    documents: int = 0


@dataclass
class AppendState:
    """Where the run stands, after the units before `next_unit`."""

    next_unit: int = 0
    keys: list[KeyState] = field(default_factory=list)
    file: int = -1
    line: int = 0
    offset: int = 0
    """Lines and bytes of the current file that are appended."""
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


def chain_digest(digest: str, following: str) -> str:
    """The digest of a file's units so far, and the digest of one more."""
    return xxhash.xxh3_128_hexdigest((digest + following).encode())


@dataclass
class History:
    states: list[AppendState] = field(default_factory=list)
    """In the order of `next_unit`; after a reboot only those that were synced."""
    parts: dict[int, EncodedPart] = field(default_factory=dict)
    """Finished units that are not appended yet."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of each input file that is appended to its end."""

    @property
    def last_file(self) -> int:
        """The last input file of which anything was done; -1 without any."""
        last = self.states[-1].file if self.states else -1
        return max([last, *(part.file for part in self.parts.values())])

    def only(self, keeps_state: Callable[[AppendState], bool], keeps_part: Callable[[EncodedPart], bool]) -> "History":
        """The history with these states and parts alone."""
        states = [state for state in self.states if keeps_state(state)]
        file = states[-1].file if states else -1
        parts = {number: part for number, part in self.parts.items() if keeps_part(part)}
        return History(states, parts, {number: digest for number, digest in self.digests.items() if number < file})

    def to_journal(self) -> bytes:
        """The journal that this history would be read from."""
        records: list[dict[str, Any]] = [{"file": number, "digest": digest} for number, digest in self.digests.items()]
        records += [{"state": asdict(state)} for state in self.states]
        records += [{"part": asdict(part)} for part in self.parts.values()]
        return b"".join(orjson.dumps(record) + b"\n" for record in records)


def read_history(journal: Path) -> History:
    history, rebooted = History(), False
    for record in read_journal(journal):
        if "part" in record:
            part = EncodedPart(**record["part"])
            part.bad = [(line, offset, reason) for line, offset, reason in part.bad]
            history.parts[part.unit] = part
        elif "digest" in record:
            history.digests[record["file"]] = record["digest"]
        elif "state" in record:
            state = AppendState(**record["state"])
            state.keys = [KeyState(**key) for key in record["state"]["keys"]]
            rebooted = rebooted or state.boot != boot_id()
            if not rebooted or state.synced:
                history.states.append(state)
    after = history.states[-1].next_unit if history.states else 0
    history.parts = {} if rebooted else {number: part for number, part in history.parts.items() if number >= after}
    return history


def cutting_rules(files: Sequence[InputFile]) -> list[list[Any]]:
    """What decides, beside its bytes, how each file is cut into units."""
    return [[file.source, file.compression, file.shared_out] for file in files]


def same_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether both settings are about the same list of files, whatever is in them."""
    names = [[file["path"] for file in settings.get("inputs", [])] for settings in (before, now)]
    return names[0] == names[1]


def keep_unchanged(
    history: History, before: Mapping[str, Any], now: Mapping[str, Any], files: Sequence[InputFile], unit_size: int
) -> History:
    """The history as far as it is true of the input as it is now."""
    number = 0
    with progress("checking the changed input", sum(file.size for file in files[: history.last_file + 1])) as bar:
        for file in files[: history.last_file + 1]:
            place = file.number
            if before["cuts"][place] != now["cuts"][place]:
                return _cut(history, file, 0, set())
            if before["inputs"][place] == now["inputs"][place]:
                number += sum(1 for _ in source_named(file.source).units(file, unit_size))
                bar.advance(file.size)
                continue
            if file.source not in LINE_SOURCES:
                return _cut(history, file, 0, set())
            check = _FileComparison(history, file, number)
            for unit in source_named(file.source).units(file, unit_size):
                check.add(unit, bar)
            if not check.is_whole():
                return _cut(history, file, check.kept, check.parts)
            number = check.number
    return history


class _FileComparison:
    """Compares the units of one file with the history."""

    def __init__(self, history: History, file: InputFile, number: int) -> None:
        self._history, self._file = history, file.number
        self._states = {state.next_unit: state for state in history.states if state.file == file.number}
        self._digest = ""
        self.number, self.kept = number, 0
        """Number of the next unit, and of the first one that no verified state holds."""
        self.parts: set[int] = set()

    def add(self, unit: Unit, bar: Bar) -> None:
        content = xxhash.xxh3_128()
        for block in unit_lines(unit):
            content.update(block)
        self._digest = chain_digest(self._digest, content.hexdigest())
        part = self._history.parts.get(self.number)
        if part is not None and part.file == self._file and part.digest == content.hexdigest():
            self.parts.add(self.number)
        self.number += 1
        state = self._states.get(self.number)
        if state is not None and state.digest == self._digest:
            self.kept = self.number
        bar.advance(unit.weight)

    def is_whole(self) -> bool:
        """Whether the file was appended to its end, and still is the same."""
        return self._history.digests.get(self._file) == self._digest


def _cut(history: History, file: InputFile, units: int, parts: set[int]) -> History:
    """The history without the units of `file` from number `units` on, but for some parts, and without later files."""
    kept = history.only(
        lambda state: state.file < file.number or (state.file == file.number and state.next_unit <= units),
        lambda part: part.file < file.number or part.unit in parts,
    )
    documents = kept.states[-1].documents if kept.states else 0
    log(f"{file.path} has changed since this run stopped; {count_of(documents, 'document')} before the change are kept")
    return kept
