"""`holdfast doctor`: checks of this machine for a job.

Every check uses the real thing (takes the lock, renames the file, runs the program) and gives a verdict with advice. No check
leaves a change behind.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.config import read_config
from holdfast.launch import node_links
from holdfast.launch.training_job import TrainingJob, dataset_prefixes
from holdfast.parallel.layout import layout_of
from holdfast.system.cpu_features import DEFAULT, VARIABLE, WITHOUT_AMX, Probe, examine_amx, onednn_limit
from holdfast.train.run_folder.paths import with_absolute_paths

Verdict = Literal["pass", "warn", "fail"]
OLDEST_TORCH = (2, 11)
LEAST_FREE_BYTES = 10 << 30
MAX_SKEW_MS = 1000.0
LEAST_MB_PER_S = 100.0


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def passes_if(condition: bool, name: str, found: str, advice: str, otherwise: Verdict = "fail") -> Check:
    return Check(name, "pass", found) if condition else Check(name, otherwise, found, advice)


def check_software() -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield passes_if(sys.version_info >= (3, 11), "python", python, "Holdfast needs Python 3.11 or newer")
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "fail", str(error), "install torch 2.11 or newer")
        return
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    yield passes_if(version >= OLDEST_TORCH, "torch", torch.__version__, "install torch 2.11 or newer")
    if torch.version.cuda is None:
        yield Check("cuda", "warn", "this torch is built for CPU only", "install a CUDA build of torch to use GPUs")
        return
    if not torch.cuda.is_available():
        advice = "check that the driver is installed and new enough, and that the job requests GPUs"
        yield Check("cuda", "warn", f"CUDA {torch.version.cuda}, but no GPU can be used", advice)
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Check("cuda", "pass", f"CUDA {torch.version.cuda}, NCCL {nccl}")


def check_cpu(probe: Probe = DEFAULT) -> Iterator[Check]:
    """Whether bf16 and fp16 matrix products work on the CPU: some virtual machines report AMX and trap on it."""
    found = examine_amx(probe)
    facts = {
        "absent": "no AMX",
        "works": "AMX works",
        "limited": f"AMX, oneDNN limited to {onednn_limit()}",
        "traps": "AMX ends processes with SIGILL",
        "unknown": "AMX could not be tested: the test product neither finished nor trapped",
    }
    advice = f"training sets {VARIABLE}={WITHOUT_AMX} by itself; set it for other programs that use torch on this CPU"
    yield passes_if(found not in ("traps", "unknown"), "cpu", facts[found], advice, "warn")


def check_gpus() -> Iterator[Check]:
    """All GPUs are of one model, and none is throttled."""
    query = "name,memory.total,clocks.sm,clocks.max.sm,driver_version,clocks_throttle_reasons.hw_slowdown"
    listed = output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    if listed is None:
        yield Check("gpus", "warn", "nvidia-smi is not installed", "expected on a machine without GPUs")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    names = sorted({row[0] for row in rows})
    slow = [str(index) for index, row in enumerate(rows) if row[5] == "Active"]
    clocks = ", ".join(f"{row[2]}/{row[3]}" for row in rows)
    found = f"{len(rows)} × {' and '.join(names)}, {rows[0][1]} MiB, driver {rows[0][4]}, clocks {clocks} MHz"
    if slow:
        advice = f"GPU {', '.join(slow)}: hardware slowdown is active (heat or power); drain the node"
        yield Check("gpus", "fail", found, advice)
        return
    advice = "training is as fast as the slowest GPU; choose equal nodes with --constraint"
    yield passes_if(len(names) == 1, "gpus", found, advice, "warn")


def check_shared_memory(folder: Path, needed: int | None) -> Iterator[Check]:
    """Compares the memory file system with the size of the configuration's snapshots."""
    if not folder.is_dir():
        yield Check("shared memory", "fail", f"{folder} is not a folder", "mount a tmpfs there or set snapshot_dir")
        return
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {gib(usage.free)} free of {gib(usage.total)}"
    if needed is None:
        advice = "64 MB is the default of a container; give docker --shm-size, or a memory volume"
        yield passes_if(usage.total > 64 << 20, "shared memory", found, advice, "warn")
        return
    advice = f"give the container --shm-size={-(-needed // 2**30)}g (or an emptyDir of that size), or fewer snapshots"
    yield passes_if(usage.free >= needed, "shared memory", f"{found}, the snapshots take {gib(needed)}", advice)


def check_folder(name: str, folder: Path) -> Iterator[Check]:
    """Locks that exclude, renames that replace, and free space: fetching and checkpoints need all three."""
    if folder.exists() and not folder.is_dir():
        yield Check(name, "fail", f"{folder} is not a folder", "choose another folder")
        return
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(existing, os.W_OK):
        yield Check(name, "fail", f"{existing} cannot be written", "choose another folder")
        return
    try:
        problems = folder_problems(existing)
    except OSError as error:
        found = f"{existing}: a file cannot be written ({error.strerror})"
        yield Check(name, "fail", found, "free some space, or choose another folder")
        return
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {gib(free)} free" + ("" if folder == existing else f" (does not exist; checked in {existing})")
    if problems:
        yield Check(name, "fail", found, "; ".join(problems))
    else:
        advice = "little free space: checkpoints and data may not fit"
        yield passes_if(free >= LEAST_FREE_BYTES, name, f"{found}, flock excludes, rename replaces", advice, "warn")


def folder_problems(folder: Path) -> list[str]:
    problems = []
    with tempfile.TemporaryDirectory(prefix=".holdfast-doctor-", dir=folder) as scratch:
        if not lock_excludes(Path(scratch)):
            problems.append("flock does not exclude (mount it with flock, e.g. Lustre -o flock)")
        if not rename_replaces(Path(scratch)):
            problems.append("rename does not replace a file that is open")
    return problems


def lock_excludes(folder: Path) -> bool:
    """Whether a second process cannot take a lock that this one holds."""
    path = folder / "lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return False
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        second = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    return b"BlockingIOError" in second.stderr


def rename_replaces(folder: Path) -> bool:
    old, new = folder / "name", folder / "temporary"
    old.write_text("old")
    new.write_text("new")
    try:
        with old.open() as reader:
            os.replace(new, old)
            return reader.read() == "old" and old.read_text() == "new"
    except OSError:
        return False


def check_scheduler() -> Iterator[Check]:
    """Which of Slurm, Pyxis, Enroot, Docker and kubectl are installed. Training on this machine needs none of them."""
    version = output("sinfo", "--version")
    if version is None:
        yield Check("slurm", "warn", "not installed", "`holdfast launch slurm` needs it; `holdfast train` does not")
    else:
        listed = output("sinfo", "-h", "-o", "%P %a %D %T")
        states = "the controller does not answer" if listed is None else "; ".join(listed.strip().splitlines())
        yield passes_if(listed is not None, "slurm", f"{version}; {states}", "check it with `scontrol ping`")
        pyxis = "--container-image" in (output("srun", "--help") or "")
        advice = "without it --container-image is refused; see Pyxis in plugstack.conf"
        yield passes_if(pyxis, "pyxis", "in srun" if pyxis else "not in srun", advice, "warn")
    programs = {"enroot": "launch image import", "docker": "launch image build", "kubectl": "launch kubernetes"}
    for program, verb in programs.items():
        path = shutil.which(program)
        yield passes_if(path is not None, program, path or "not installed", f"`holdfast {verb}` needs it", "warn")


def check_links(folders: list[Path]) -> Iterator[Check]:
    """The links between the nodes of this Slurm step; none outside of a step."""
    task = node_links.task_of_step()
    if task is None:
        return
    for link in node_links.measure(*task, folders):
        problems = []
        if abs(link.skew_ms) > MAX_SKEW_MS:
            problems.append("the clocks differ: run chrony or ntpd")
        if link.megabytes_per_s < LEAST_MB_PER_S:
            problems.append("slow for training on several nodes: check that this is the right network interface")
        if link.locks_not_seen:
            problems.append(
                f"file locks do not exclude other nodes on {', '.join(link.locks_not_seen)}: mount with flock"
            )
        found = f"clock {link.skew_ms:+.1f} ms, round trip {link.round_trip_ms:.2f} ms, {link.megabytes_per_s:,.0f} MB/s over TCP"
        verdict: Verdict = "fail" if link.locks_not_seen else "warn" if problems else "pass"
        yield Check(f"link to {link.node}", verdict, found, "; ".join(problems))


def job_needs(config: Path | None) -> tuple[dict[str, Path], Path, int | None]:
    """The folders that a job uses, the folder of its snapshots, and their size in bytes (None: not known)."""
    from holdfast.assets.cache import cache_folder

    folders = {"cache": cache_folder()}
    if "DATA_PATH" in os.environ:
        folders["$DATA_PATH"] = Path(os.environ["DATA_PATH"])
    if config is None:
        return folders, Path("/dev/shm"), None
    read = with_absolute_paths(read_config(config))
    folders |= {f"data {i}": Path(prefix).parent for i, prefix in enumerate(dataset_prefixes(read), 1)}
    if read.train.save:
        folders["run"] = Path(read.train.save)
    job = TrainingJob(read, layout_of(read.parallel))
    needed = None if read.model.vocab_size is None else job.snapshot_bytes()
    return folders, Path(read.snapshot.snapshot_dir), needed


def examine(folders: dict[str, Path], snapshot_dir: Path, needed: int | None) -> list[Check]:
    """All checks, in the order of the table."""
    existing = [folder for folder in folders.values() if folder.is_dir()]
    return [
        *check_software(),
        *check_cpu(),
        *check_gpus(),
        *check_shared_memory(snapshot_dir, needed),
        *(check for name, folder in folders.items() for check in check_folder(name, folder)),
        *check_scheduler(),
        *check_links(existing),
    ]


def table(checks: list[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name:<{width}}  {check.found}")
        if check.advice and check.verdict != "pass":
            lines.append(f"{'':<4}  {'':<{width}}  → {check.advice}")
    return "\n".join(lines)


def output(*command: str) -> str | None:
    """The output of a program; None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
