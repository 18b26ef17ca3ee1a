"""`python -m holdfast.train.fork_server CONFIG`: a process that has imported what a rank imports, and forks ranks.

Its standard input is a socket of the supervisor (`forked_ranks.py`). For each descriptor that it gets there it forks a process,
which reads its environment from that descriptor and runs as a rank; without an environment it ends and has done nothing.
The invariant: at a fork this process has one thread and no CUDA context, so that the rank starts like a new process.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
from pathlib import Path

from holdfast import kernels
from holdfast.train.rank_log import FOLDER_VARIABLE, open_helper_log
from holdfast.train.spare import read_job, set_streams
from holdfast.train.standby import READY

FORK = b"f"
SERVER_LOG = "fork-server.log"


def main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    control = socket.socket(fileno=os.dup(0))
    output = os.dup(2)
    set_streams(open_helper_log(Path(os.environ[FOLDER_VARIABLE]) / SERVER_LOG, "fork server"))
    import_all()
    reason = unsafe_to_fork()
    if reason:
        sys.exit(f"ranks cannot be forked: {reason}")
    channel = _serve(control)
    job = read_job(channel)
    if not job.endswith(b"\n"):  # the supervisor has ended, or has started the rank in another way
        os._exit(0)
    set_streams(output)
    os.environ.clear()
    os.environ.update(json.loads(job))
    from holdfast.train.__main__ import main as run_rank

    run_rank()


def import_all() -> None:
    """Imports what a rank imports, also what torch imports when it is first used. Garbage collection stays off."""
    gc.disable()
    # numpy's OpenBLAS starts its threads when it is loaded. Ranks multiply no matrices with numpy.
    given = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401

    del os.environ["OPENBLAS_NUM_THREADS"]
    if given is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = given
    import torch

    import holdfast.train.checks.preflight
    import holdfast.train.command
    import holdfast.train.worker  # noqa: F401

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    if torch.version.cuda:  # there the layers are Triton kernels or compiled
        import_for_cuda()
    gc.freeze()


def import_for_cuda() -> None:
    """Imports what ranks need on a GPU, without a look at the GPU: inductor asks for one when it is imported, which would
    initialize CUDA."""
    import torch

    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        import torch._inductor.compile_fx

        if kernels.available():
            for module in pkgutil.iter_modules(kernels.__path__):
                importlib.import_module(f"{kernels.__name__}.{module.name}")
        for name in ("flash_attn.cute.interface", "quack.gemm_interface"):  # of the extra `cuda`, which import slowly
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = asked


def unsafe_to_fork() -> str | None:
    """Why a forked process might not work as a new one does; None if nothing speaks against it."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        names = {Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")}
        return f"the imports started {threads - 1} more threads ({', '.join(sorted(names))})"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the one that lists the folder
        if target.startswith("/dev/nvidia"):
            return "the imports initialized CUDA"
    return None


def _serve(control: socket.socket) -> socket.socket:
    """Forks a process for each descriptor that arrives. Returns in that process only, with its descriptor as a socket."""
    control.sendall(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, len(FORK), 1)
        if not message:  # the supervisor has ended
            os._exit(0)
        channel = socket.socket(fileno=descriptors[0])
        between = os.fork()
        if between == 0:
            # The rank must be a child of the supervisor, which is the nearest subreaper now: it inherits the rank from a
            # parent that ends. The supervisor may signal the rank's process group as soon as it has the answer.
            os.setsid()
            rank = os.fork()
            if rank:
                with contextlib.suppress(OSError):  # the rank has ended
                    os.setpgid(rank, rank)
                control.sendall(b"%d\n" % rank)
                os._exit(0)
            control.close()
            return channel
        channel.close()
        os.waitpid(between, 0)
        control.sendall(b"\n")  # by now the supervisor is the parent


if __name__ == "__main__":
    main()
