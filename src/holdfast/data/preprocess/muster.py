"""Where a worker process begins. It may be called before there is anything to do, and loads what it will need meanwhile.

Standard input is a socket. It brings the workers' connections, then the tokenizer's recipe and the choice of its engine, then
the Job.
"""

import importlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from holdfast.data.preprocess.ahead import STANDARD_INPUT
from holdfast.tokenizers import tables


def main() -> None:
    """The life of the process that a Crew is led by."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loading = threading.Thread(target=importlib.import_module, args=["holdfast.data.preprocess.worker"])
    loading.start()
    control = Connection(STANDARD_INPUT)
    try:
        descriptors = [recv_handle(control) for _ in range(control.recv())]
        recipe, engine = control.recv()
        if tables.are_needed(recipe, engine):
            tables.begin(recipe.definition)
        loading.join()
        from holdfast.data.preprocess.worker import build, lead

        # What can be said against the tokenizer is said when somebody listens.
        tokenizer = build(recipe, engine)
        job = control.recv()
    except (EOFError, ConnectionError):
        os._exit(0)  # there was nothing to do, or the caller is gone
    status = lead(tokenizer, job, descriptors)
    sys.stderr.flush()
    # At once: an interpreter that ends properly takes the tokenizer's tables apart, and somebody waits for that.
    os._exit(status)
