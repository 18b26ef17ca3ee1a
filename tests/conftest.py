"""For the whole suite: Ctrl-C works in it, and nothing that it started outlives it."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

# A suite that was started in the background may have inherited that Ctrl-C is ignored, and so would every program it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "HOLDFAST_TEST_SESSION"
EXIT_SECONDS = 60.0

if MARK not in os.environ:
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    OWNER = os.getpid()
else:
    OWNER = 0


def started_here() -> list[int]:
    """The processes that carry this session's mark, whoever their parent is by now."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Keepers linger by design, and a rank that lost its peers may wait for minutes: whoever waits for this session's output
    must not wait for them. A thread that keeps the interpreter from ending is shown, and ends with it."""
    if os.getpid() != OWNER:
        return
    for process in started_here():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            os.kill(process, signal.SIGKILL)
            if "from multiprocessing." not in name:  # its servers would have gone with this process
                print(f"left behind and killed: {process} {name[:150]}", file=sys.stderr)
    for child in multiprocessing.active_children():
        child.kill()
    watchdog = threading.Timer(EXIT_SECONDS, _end_hard, [getattr(config, "exit_status", 1)])
    watchdog.daemon = True
    watchdog.start()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.exit_status = int(exitstatus)  # type: ignore[attr-defined]


def _end_hard(status: int) -> None:
    print(f"the interpreter did not end within {EXIT_SECONDS:.0f} s:", file=sys.stderr)
    faulthandler.dump_traceback()
    os._exit(status)
