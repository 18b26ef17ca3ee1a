"""For the whole suite: Ctrl-C works in it, and nothing that it started outlives it."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch

from holdfast.system.cpu_features import avoid_amx_traps
from tests import leftovers

avoid_amx_traps()  # before a test computes: the programs that tests start inherit it

# A suite that was started in the background may have inherited that Ctrl-C is ignored, and so would every program it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers and ranks share the cores: threads of torch that wait for each other would only burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the environment when it was imported

# Triton decides when it is imported whether kernels are interpreted, and torch may import it at any time.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

EXIT_SECONDS = 60.0
mark_key = pytest.StashKey[str]()
status_key = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[mark_key] = leftovers.begin()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Keepers linger by design, and a rank that lost its peers may wait for minutes: the reader of this session's output must not
    wait for them. A thread that keeps the interpreter from ending is shown, and ends with it."""
    for command in leftovers.kill_all(config.stash[mark_key]):
        if "from multiprocessing." not in command:  # its servers would have ended with this process
            print(f"left behind and killed: {command}", file=sys.stderr)
    for child in multiprocessing.active_children():
        child.kill()
    if hasattr(config, "workerinput"):
        return  # a worker without work waits for the others, and ends with the process that started it
    watchdog = threading.Timer(EXIT_SECONDS, _end_hard, [config.stash.get(status_key, 1)])
    watchdog.daemon = True
    watchdog.start()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[status_key] = int(exitstatus)


def _end_hard(status: int) -> None:
    print(f"the interpreter did not end within {EXIT_SECONDS:.0f} s:", file=sys.stderr)
    faulthandler.dump_traceback()
    os._exit(status)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the Slurm cluster wait most, so they come first."""
    items.sort(key=lambda item: "cluster" not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A parallel worker takes one file at a time, so that module fixtures are made once; one worker takes all of tests/launch,
    whose files share one Slurm cluster. The long tests of test_fuzz.py, which has no fixtures, are spread over the workers."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.endswith("test_fuzz.py"):
                return nodeid
            return "launch" if "/launch/" in file else file

    return ByFile(config, log)
