"""`python -m holdfast.train.spare CONFIG`: a process that has imported everything and waits to become a rank.

Its standard input is a socket of the supervisor, its output goes to a log until it becomes a rank. It ends when the supervisor
ends. It imports at a low priority, in a thread of its own: a process cannot raise its priority again, and the rank must run
at the normal one.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from holdfast.train.rank_log import FOLDER_VARIABLE, open_helper_log
from holdfast.train.standby import READY, spare_log

LOW_PRIORITY = 5
"""The lowest would keep spares from ever being ready on a host whose cores are all in use."""
POLL_SECONDS = 0.2


def main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    channel = socket.socket(fileno=os.dup(0))
    output = os.dup(2)
    log = spare_log(Path(os.environ[FOLDER_VARIABLE]), os.environ["LOCAL_RANK"])
    set_streams(open_helper_log(log, "spare"))
    warm_up = threading.Thread(target=_warm_up)
    warm_up.start()
    _join_unless_closed(warm_up, channel)
    _rehearse()
    with contextlib.suppress(OSError):
        channel.sendall(READY)
    job = read_job(channel)
    if not job.endswith(b"\n"):  # the supervisor has ended
        os._exit(0)
    set_streams(output)
    os.environ.update(json.loads(job))
    from holdfast.train.__main__ import main as run_rank

    run_rank()


def _join_unless_closed(thread: threading.Thread, channel: socket.socket) -> None:
    """Waits for the thread; ends this process when the supervisor ends meanwhile."""
    closed = select.poll()
    closed.register(channel, 0)  # only that it was closed, which is always reported
    while thread.is_alive():
        if closed.poll(0):
            os._exit(0)
        thread.join(POLL_SECONDS)


def _rehearse() -> None:
    """At normal priority: threads that torch starts here go on in the rank."""
    import torch

    if not torch.cuda.is_available():
        return
    from holdfast.train.checks.preflight import resolve
    from holdfast.train.command import parse
    from holdfast.train.worker import rehearse

    try:
        rehearse(resolve(parse(sys.argv[1:]).config, vocab_size_given=True)[0])
    except Exception:  # the rank may well work where a model with one layer does not
        traceback.print_exc()
        torch.cuda.synchronize()  # raises again if the device cannot be used any more: then this process ends


def read_job(channel: socket.socket) -> bytes:
    """The environment of the rank, as one line of JSON; without its end when the supervisor has ended."""
    try:
        with channel, channel.makefile("rb") as lines:
            return lines.readline()
    except OSError:
        return b""


def set_streams(output: int) -> None:
    """Standard input from nowhere; standard output and errors to a descriptor, which is closed here."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nowhere)
    os.close(output)


def _warm_up() -> None:
    """Imports what a rank imports, also what torch imports when it is first used, and creates the CUDA context."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        import torch

        import holdfast.train.worker  # noqa: F401
        from holdfast.parallel.mesh import pick_device

        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=pick_device()))])
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
