"""Where a worker process begins. What takes long is begun first: the tokenizer's tables, beside the imports.

Standard input brings two pickles: early, the tokenizer's recipe and whether its tables will be needed; then the Job.
"""

import os
import pickle
import signal
import sys

from holdfast.tokenizers import tables


def main() -> None:
    """The life of the process that a Crew starts; its arguments are the descriptors of the workers' connections."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        recipe, with_tables = pickle.load(sys.stdin.buffer)
        if with_tables:
            tables.begin(recipe.definition)
        from holdfast.data.worker import lead

        job = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):
        os._exit(0)  # there was nothing to do, or the caller is gone
    status = lead(recipe, job, [int(word) for word in sys.argv[1:]])
    sys.stderr.flush()
    # At once: an interpreter that ends properly takes the tokenizer's tables apart, and somebody waits for that.
    os._exit(status)
