"""Flight records: what each rank's collectives did last, written when one of them times out, into RUN/flight/START/rank_N.

torch records the last collectives of a process. NCCL's watchdog writes them itself, by the variables that `record_environment`
returns; a rank on gloo calls `write_record`. `describe_records` names the collective and the ranks that did not arrive.
The invariant: a record is data. Pickles are read without any class or function, and what does not fit is left out.
"""

import contextlib
import io
import os
import pickle
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from holdfast.system.atomic_files import publish_bytes
from holdfast.system.progress import log

FOLDER = "flight"
PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""torch's variable: the path of a record without the number of the rank."""
ENTRIES = 2000
MAX_BYTES = 64 << 20
# A rank that timed out waits this long for the records of the others, whose limits end at about the same time.
OTHERS_SECONDS = 10.0

Record = dict[str, Any]


def record_environment(folder: Path) -> dict[str, str]:
    """Variables that have torch keep records and write them into the folder, which is created. What the user set stays."""
    with contextlib.suppress(OSError):  # a full disk costs the records only
        folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder.resolve() / "rank_")
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        PREFIX: prefix,
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def remove_if_empty(folder: Path) -> None:
    """Removes the folder of a start that wrote no records, and then RUN/flight."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def write_record(rank: int, here: Sequence[int], seconds: float = OTHERS_SECONDS) -> None:
    """Writes this rank's record, and waits up to `seconds` for those of the node's other ranks. Nothing without a prefix."""
    from torch._C import _distributed_c10d as native
    from torch.distributed import distributed_c10d as c10d

    prefix = os.environ.get(PREFIX)
    if prefix is None or not hasattr(native, "_dump_fr_trace_json"):
        return
    try:
        record = orjson.loads(native._dump_fr_trace_json())
        world = c10d._world
        # gloo leaves out the names. A group that this rank is not in has ranks, but no name.
        groups = {
            world.pg_names[group]: ranks for group, ranks in world.pg_group_ranks.items() if group in world.pg_names
        }
        record["pg_config"] = {name: {"ranks": str(list(ranks))} for name, ranks in groups.items()}
        publish_bytes(Path(f"{prefix}{rank}"), orjson.dumps(record))
    except Exception as error:
        log(f"warning: no flight record of rank {rank}: {error!r}")
        return
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(Path(f"{prefix}{other}").exists() for other in here):
        time.sleep(0.1)


def describe_records(folder: Path, run: Path, here: Collection[int]) -> dict[str, Any]:
    """Keys for the event of a failure: flight_record, collective, missing_ranks (of the node's ranks `here`, whose records are in
    this folder), as far as the records show them."""
    records = dict(read_records(folder))
    if not records:
        return {}
    found: dict[str, Any] = {"flight_record": str(folder.relative_to(run))}
    waiting = {rank: key for rank, record in records.items() if (key := _waiting_collective(record)) is not None}
    if not waiting:
        return found
    group, _ = Counter((name, members) for name, members, _, _ in waiting.values()).most_common(1)[0]
    # A rank may have entered later collectives of the group too, without waiting for them.
    sequence, operation = min(
        (number, operation) for *where, number, operation in waiting.values() if (*where,) == group
    )
    name, members = group
    arrived = {rank for rank, record in records.items() if _has_entered(record, name, members, sequence)}
    missing = sorted((set(members) & set(here)) - arrived)
    return {**found, "collective": operation, **({"missing_ranks": missing} if missing else {})}


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def read_records(folder: Path) -> Iterator[tuple[int, Record]]:
    """(rank, record) of each record that can be read."""
    for path in sorted(folder.glob("rank_*")):
        number = path.name.removeprefix("rank_")
        try:
            if not number.isdigit() or not path.is_file() or path.stat().st_size > MAX_BYTES:
                continue
            content = path.read_bytes()
            record = orjson.loads(content) if content[:1] == b"{" else _DataUnpickler(io.BytesIO(content)).load()
        except Exception:
            continue
        if isinstance(record, dict):
            yield int(number), record


class _DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries; refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


def _collectives(record: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], int, Record]]:
    """(group, its ranks, number, entry) of each collective, in the order in which the rank entered them."""
    entries, groups = record.get("entries"), record.get("pg_config")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        group, sequence = entry.get("process_group"), entry.get("collective_seq_id")
        if isinstance(group, list | tuple) and group and isinstance(sequence, int):
            yield str(group[0]), _members(groups, str(group[0])), sequence, entry


def _members(groups: Any, name: str) -> tuple[int, ...]:
    described = groups.get(name) if isinstance(groups, dict) else None
    ranks = described.get("ranks") if isinstance(described, dict) else None
    words = str(ranks or "").strip("[]").split(",")
    return tuple(int(word) for word in words if word.strip().isdigit())


def _waiting_collective(record: Record) -> tuple[str, tuple[int, ...], int, str] | None:
    """The first collective that this rank entered and that has not ended; else the last one: on gloo a timeout ends it."""
    found = None
    for name, members, sequence, entry in _collectives(record):
        found = name, members, sequence, str(entry.get("profiling_name", "unknown"))
        if not entry.get("retired") and entry.get("state") != "completed":
            break
    return found


def _has_entered(record: Record, name: str, members: tuple[int, ...], sequence: int) -> bool:
    found = (number for group, ranks, number, _ in _collectives(record) if (group, ranks) == (name, members))
    return max(found, default=-1) >= sequence
