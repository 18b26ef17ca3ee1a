"""Whether a process is alive, and which machine it runs on.

A process is identified by its pid and its start time, so that a reused pid is not taken for it. A pid means something only on
one machine: since one boot, and in one pid namespace (container).
"""

import functools
import hashlib
import os
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

PROCESS_KEY = r"(?P<machine>[0-9a-f]{16})-(?P<process>\d+)-(?P<start>\d+)"


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process across machines. The fields are those of `holder` in a lease file."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    start: int

    def is_local(self) -> bool:
        """True if the pid has its meaning here: same boot, same pid namespace."""
        return self.boot != "" and (self.boot, self.pid_namespace) == this_machine()

    def is_dead(self) -> bool:
        """True only with proof; a process of another machine or container is never proven dead."""
        if not self.is_local():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        found = _read_stat(self.pid)
        return found is not None and (found.ended or found.start != self.start)


def boot_id() -> str:
    """Changes with every boot of the machine; empty where there is no /proc."""
    return this_machine()[0]


@functools.cache
def this_machine() -> tuple[str, str]:
    """Boot id and pid namespace; empty where there is no /proc: then no process can be proven dead."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def this_process() -> ProcessIdentity:
    return ProcessIdentity(socket.gethostname(), *this_machine(), os.getpid(), start_time(os.getpid()))


def process_key() -> str:
    """This process, for the name of a file that it alone uses: PROCESS_KEY matches it."""
    own = this_process()
    return f"{_machine_key()}-{own.pid}-{own.start}"


def names_dead_process(name: re.Match[str]) -> bool:
    """Whether the process that such a name holds is proven dead."""
    owner = replace(this_process(), pid=int(name["process"]), start=int(name["start"]))
    return name["machine"] == _machine_key() and owner.is_dead()


def _machine_key() -> str:
    """A short name of this machine's boot and pid namespace, in which a process number has one meaning."""
    return hashlib.sha256("\0".join(this_machine()).encode()).hexdigest()[:16]


def start_time(pid: int) -> int:
    """When a process of this machine started, in the kernel's ticks since boot; 0 if it has ended or is a zombie."""
    found = _read_stat(pid)
    return 0 if found is None or found.ended else found.start


def process_alive(pid: int, started: int) -> bool:
    """True if the process of this machine with this pid and start time is alive."""
    return pid > 0 and started != 0 and start_time(pid) == started


class _Stat(NamedTuple):
    start: int
    ended: bool


def _read_stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            content = file.read(1 << 12)
        # The command name may contain spaces and brackets: the fields count from the last bracket.
        fields = content.rpartition(b")")[2].split()
        # The first thread of a live process may be a zombie while others run.
        ended = fields[0] in (b"Z", b"X") and len(os.listdir(f"/proc/{pid}/task")) <= 1
        return _Stat(int(fields[19]), ended)
    except (OSError, IndexError):
        return None
