"""The signals that end the supervisor of a node: raised as torchelastic's exception, and held while processes are started."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def raise_on_signals() -> None:
    """As torchelastic does from the first start of the ranks on: the fork server, which starts before, may take a while."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, stop)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Handles signals after the block: one that comes while processes are started would lose those started so far.

    The processes inherit the mask and unblock the signals. The mask alone is not enough: Python runs a handler in the main
    thread even if another thread got the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handlers = {name: signal.signal(name, lambda number, _: held.append(number)) for name in SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for name, handler in handlers.items():
            signal.signal(name, handler)
        for number in held[:1]:
            signal.raise_signal(number)
