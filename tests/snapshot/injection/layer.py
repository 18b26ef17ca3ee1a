"""Faults in the system calls of Holdfast, one per process tree, chosen by seed.

`install` replaces the functions of os, io, mmap, fcntl, socket, ssl, subprocess, ctypes and time that open, write,
sync, rename, map, lock, connect, send, receive, start a process or read a clock. A call counts if it comes from a
module in `MODULES`, directly or by way of pathlib, shutil and ssl; its site is the call and the function that makes it.
One call (site, occurrence, role of the process) fails, stalls, shifts the clock or ends the process with SIGKILL; a
file claims the fault, so that it happens once however many processes there are. The same functions record which sites
an undisturbed run passes.

A forked process inherits the layer. A new interpreter installs it itself: `environment` gives the variables that make the
`sitecustomize` in the folder `site` do so.

Not covered: stores into mapped memory (a kill there is test_process_faults.py), calls inside libc, reads of files.
"""

import builtins
import ctypes
import errno
import fcntl
import io
import json
import mmap
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

MODULES = ("holdfast.snapshot.", "holdfast.checkpoint.", "holdfast.system.")
BETWEEN = ("pathlib", "shutil", "contextlib", "tempfile", "threading", "concurrent.", "ssl", __name__)
"""Modules that make the call for another one."""
OCCURRENCES = 3
VARIABLE, SITE = "HOLDFAST_FAULT_LAYER", Path(__file__).with_name("site")
STALL_SECONDS, JUMP_SECONDS = 0.3, 3600.0
DIE, DIE_AFTER, STALL, SHORT, JUMP, BACK = "die", "die after", "stall", "short write", "clock jumps", "clock goes back"

OPEN = ["EIO", "ENOSPC", "EROFS", "EMFILE"]
WRITE = ["EIO", "ENOSPC"]
CALLS: list[tuple[Any, str, list[str]]] = [
    (os, "open", OPEN),
    (io, "open", OPEN),
    (builtins, "open", OPEN),
    (os, "write", [*WRITE, SHORT]),
    (os, "pwrite", WRITE),
    (os, "ftruncate", WRITE),
    (os, "posix_fallocate", WRITE),
    (os, "fsync", WRITE),
    *((os, name, ["EIO", "ENOSPC", "EROFS"]) for name in ("rename", "replace", "link", "mkdir")),
    *((os, name, []) for name in ("unlink", "rmdir", "chmod", "utime")),
    (mmap, "mmap", ["ENOMEM"]),
    (fcntl, "flock", ["ENOLCK"]),
    (fcntl, "fcntl", ["ENOLCK"]),
    (socket, "create_connection", ["ECONNREFUSED", "ETIMEDOUT", "EMFILE"]),
    (socket, "create_server", ["EADDRNOTAVAIL", "EMFILE"]),
    (socket.socket, "accept", ["EMFILE", "ECONNABORTED"]),
    (ssl.SSLSocket, "do_handshake", ["ECONNRESET", "ETIMEDOUT"]),
    (ssl.SSLSocket, "sendall", ["EPIPE", "ETIMEDOUT"]),
    (ssl.SSLSocket, "recv_into", ["ECONNRESET", "ETIMEDOUT"]),
    (subprocess, "run", ["EAGAIN", "ENOMEM"]),
    (ctypes, "CDLL", ["EIO"]),
    (time, "time", [JUMP, BACK]),
    (time, "monotonic", []),
]
"""What can go wrong with a call besides the end of the process and a stall. ctypes.CDLL stands for the call that follows it:
renameat2 or fallocate."""


class Site(NamedTuple):
    role: str
    call: str
    caller: str
    occurrence: int


@dataclass(frozen=True)
class Fault:
    site: Site
    do: str

    def __str__(self) -> str:
        role, call, caller, occurrence = self.site
        return f"{self.do} in call {occurrence + 1} of {call} by {caller} of the {role}"


class Layer:
    """Counts the calls of this process; does the fault where it is due."""

    def __init__(self, role: str, fault: Fault | None, folder: Path, record: bool = False) -> None:
        """`folder` receives the files `fired`, which claims the fault, and, with `record`, `sites`."""
        self.role, self._fault, self._folder, self._record = role, fault, folder, record
        self._passed: Counter[tuple[str, str]] = Counter()
        self._clock = 0.0

    def become(self, role: str) -> None:
        """This process, just forked, has another role."""
        self.role = role
        self._passed.clear()

    def environment(self, role: str) -> dict[str, str]:
        """The variables with which a new interpreter installs this layer."""
        fault = None if self._fault is None else [list(self._fault.site), self._fault.do]
        return {
            VARIABLE: json.dumps([role, fault, str(self._folder), self._record]),
            "PYTHONPATH": os.pathsep.join(map(str, (SITE, Path(__file__).parents[3]))),
        }

    def call(self, name: str, original: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        caller = calling_function()
        if caller is None:
            return self._plain(name, original, arguments, named)
        occurrence = self._passed[name, caller]
        self._passed[name, caller] += 1
        if occurrence >= OCCURRENCES:
            return self._plain(name, original, arguments, named)
        site = Site(self.role, name, caller, occurrence)
        if self._record:
            note(self._folder / "sites", *site)
        if self._fault is None or site != self._fault.site or not self._claim_fault():
            return self._plain(name, original, arguments, named)
        return self._do(self._fault.do, name, original, arguments, named)

    def _plain(self, name: str, original: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = original(*arguments, **named)
        return result + self._clock if name == "time.time" else result

    def _do(self, do: str, name: str, original: Callable[..., Any], arguments: Any, named: dict[str, Any]) -> Any:
        if do == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == STALL:
            time.sleep(STALL_SECONDS)
        elif do in (JUMP, BACK):
            self._clock = JUMP_SECONDS if do == JUMP else -JUMP_SECONDS
        elif do == SHORT:
            original(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif do != DIE_AFTER:
            number = getattr(errno, do)
            raise OSError(number, os.strerror(number), *(str(a) for a in arguments[:1] if isinstance(a, str | Path)))
        result = self._plain(name, original, arguments, named)
        if do == DIE_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _claim_fault(self) -> bool:
        try:
            os.close(_os_open(self._folder / "fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def calling_function() -> str | None:
    """The function of Holdfast that makes this call, itself or by way of the standard library; None if another module does."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(BETWEEN):
            spec = frame.f_globals.get("__spec__")
            module = spec.name if module == "__main__" and spec is not None else module
            name = f"{module}.{frame.f_code.co_qualname}"
            return name.removeprefix("holdfast.") if f"{module}.".startswith(MODULES) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _File(io.FileIO):
    """A file opened for writing whose writes pass the layer."""

    layer: Layer

    def write(self, content: Any) -> Any:
        return self.layer.call("file.write", super().write, (content,), {})


def install(layer: Layer) -> None:
    for module, name, _ in CALLS:
        _replace(layer, module, name)
    _File.layer = layer


def _replace(layer: Layer, module: ModuleType, name: str) -> None:
    original = getattr(module, name)
    label = "open" if name == "open" and module in (io, builtins) else f"{module.__name__}.{name}"

    def replaced(*arguments: Any, **named: Any) -> Any:
        return layer.call(label, original, arguments, named)

    def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        writes = "b" in mode and set(mode) & set("wxa") and not isinstance(file, int) and calling_function() is not None
        result = layer.call(label, original, (file, mode, *arguments), named)
        if not writes:
            return result
        raw = _File(os.dup(result.fileno()), mode)
        result.close()
        unbuffered = (arguments[0] if arguments else named.get("buffering", -1)) == 0
        return raw if unbuffered else io.BufferedWriter(raw)

    setattr(module, name, opened if label == "open" else replaced)


def faults_of(call: str) -> list[str]:
    """What can go wrong with a call."""
    if call == "file.write":
        return [*WRITE, DIE, DIE_AFTER, STALL]
    own = next(faults for module, name, faults in CALLS if call in (f"{module.__name__}.{name}", name))
    return [*own, DIE, DIE_AFTER, STALL]


_os_open, _os_write = os.open, os.write


def note(path: Path, *fields: object) -> None:
    """Appends one line past the layer, whole even when others append at the same time."""
    line = "\t".join(str(one).replace("\n", " | ") for one in fields)
    descriptor = _os_open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    _os_write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


def note_keeper(folder: Path, role: str) -> None:
    """Notes in `trace` which process this keeper is, and every error that ends it or one of its threads."""
    from holdfast.system.processes import start_time

    note(folder / "trace", "keeper", role, os.getpid(), start_time(os.getpid()))

    def died(kind: Any, error: Any, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        place = traceback.extract_tb(trace)[-1] if trace else None
        note(folder / "trace", "keeper died", role, kind.__name__, error, place)

    sys.excepthook = died
    threading.excepthook = lambda event: died(event.exc_type, event.exc_value, event.exc_traceback)


def install_from_environment() -> None:
    role, fault, folder, record = json.loads(os.environ[VARIABLE])
    chosen = None if fault is None else Fault(Site(*fault[0]), fault[1])
    install(Layer(role, chosen, Path(folder), record))
    note_keeper(Path(folder), role)
