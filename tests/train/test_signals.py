"""Signals while processes are started."""

import os
import signal
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from holdfast.train.signals import SIGNALS, raise_on_signals, signals_held


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def another_thread():
    """A thread that takes the signals of this process while the main thread blocks them."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


def test_a_signal_is_handled_after_the_block(handlers, another_thread):
    ended = False
    with pytest.raises(SignalException) as raised, signals_held():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)  # a handler would run here
        ended = True
    assert ended and raised.value.sigval == signal.SIGUSR1
    with pytest.raises(SignalException):  # the handlers are back
        signal.raise_signal(signal.SIGHUP)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)
