"""CPUs that report AMX but trap when a program uses it: detected once per boot, then avoided.

Some virtual machines list `amx_tile` and `amx_bf16` in /proc/cpuinfo and end every process that uses them with SIGILL. oneDNN,
which computes torch's bf16 and fp16 products on the CPU, chooses AMX by those flags. A child process tries such products; if
it dies, `ONEDNN_MAX_CPU_ISA` keeps oneDNN below AMX. oneDNN reads the variable at its first product, so it has to be set before
that, in the process itself or in the environment that the process starts with.

Nothing here imports torch, and a CPU without AMX costs one read of /proc/cpuinfo. The result of the child is kept per boot, user
and torch version in memory (/dev/shm), in a folder that only this user can write; without such a folder each program tries again.
"""

import contextlib
import importlib.metadata
import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.system.atomic_files import publish_text
from holdfast.system.errors import HoldfastError
from holdfast.system.processes import boot_id
from holdfast.system.progress import log

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
TRAPS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)

PRODUCTS = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
for dtype in (torch.bfloat16, torch.float16):
    x = torch.ones(64, 64, dtype=dtype, requires_grad=True)
    try:
        torch.nn.functional.linear(x, x, x[0]).sum().backward()
    except RuntimeError:
        pass  # this torch has no such product on the CPU: nothing can trap
"""

Amx = Literal["absent", "limited", "works", "traps", "unknown"]
"""`limited`: the environment limits oneDNN already. `unknown`: the child process neither finished nor trapped."""


@dataclass(frozen=True)
class Probe:
    """How to test AMX, and where to keep the result."""

    cpuinfo: Path = Path("/proc/cpuinfo")
    command: tuple[str, ...] = (sys.executable, "-c", PRODUCTS)
    memory: Path = Path("/dev/shm")
    seconds: float = 120.0


DEFAULT = Probe()


def reports_amx(cpuinfo: Path = DEFAULT.cpuinfo) -> bool:
    """Whether the CPU's flags mention AMX; false where there is no such file."""
    with contextlib.suppress(OSError), cpuinfo.open(errors="replace") as file:
        for line in file:
            if line.startswith("flags"):
                return any(flag.startswith("amx") for flag in line.split())
    return False


def onednn_limit() -> str | None:
    """The limit that the environment sets, by the variable's present or former name."""
    return os.environ.get(VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA")


def examine_amx(probe: Probe = DEFAULT) -> Amx:
    """What AMX does on this CPU. Starts the child process at most once per boot, if a private folder can keep the result."""
    if not reports_amx(probe.cpuinfo):
        return "absent"
    if onednn_limit():
        return "limited"
    record = _record(probe.memory)
    if record is not None:
        with contextlib.suppress(OSError):
            kept = record.read_text()
            if kept in ("works", "traps"):
                return kept  # type: ignore[return-value]
    found = _try_products(probe)
    if record is not None and found != "unknown":
        with contextlib.suppress(OSError, HoldfastError):
            publish_text(record, found)
    return found


def avoid_amx_traps(probe: Probe = DEFAULT) -> Amx:
    """Limits oneDNN for this process and its children unless AMX works or the user chose a limit."""
    found = examine_amx(probe)
    if found in ("traps", "unknown"):
        os.environ[VARIABLE] = WITHOUT_AMX
        why = "ends processes with SIGILL" if found == "traps" else "could not be tested"
        log(f"AMX on this CPU {why}: oneDNN runs without it ({VARIABLE}={WITHOUT_AMX})")
    return found


def explain_sigill(cpuinfo: Path = DEFAULT.cpuinfo) -> str:
    """Why a rank may have died by SIGILL, and what to do."""
    limit = onednn_limit()
    if limit:
        advice = f"{VARIABLE} is {limit}; set a lower one such as AVX2"
    elif reports_amx(cpuinfo):
        advice = (
            f"this CPU reports AMX, which traps in some virtual machines; set {VARIABLE}={WITHOUT_AMX} and start again"
        )
    else:
        advice = "torch or another library was built for another CPU; `holdfast doctor` shows what is installed"
    return f"killed by SIGILL (illegal instruction): {advice}"


def _try_products(probe: Probe) -> Amx:
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(probe.command, env=quiet, capture_output=True, timeout=probe.seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if -done.returncode in TRAPS:
        return "traps"
    return "unknown" if done.returncode else "works"


def _record(memory: Path) -> Path | None:
    """The file that keeps the result; None without a boot id or a folder that only this user can write."""
    folder = memory / f"holdfast-cpu-{os.geteuid()}"
    try:
        torch = importlib.metadata.version("torch")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    boot = boot_id()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder / f"amx-{boot}-{torch}" if boot and private else None
