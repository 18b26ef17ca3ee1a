"""`holdfast doctor`: what a job will meet on this machine, before it meets it.

Every check looks at the real thing (takes the lock, renames the file, asks the program) and gives a verdict with what to do;
none changes anything that stays.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.config import read_config
from holdfast.launch import node_links
from holdfast.launch.training_job import TrainingJob, dataset_prefixes
from holdfast.parallel.layout import layout_of
from holdfast.system.cpu_features import DEFAULT, VARIABLE, WITHOUT_AMX, Probe, examine_amx, onednn_limit
from holdfast.train.run_files.paths import with_absolute_paths

Verdict = Literal["pass", "warn", "fail"]
OLDEST_TORCH = (2, 11)
LITTLE_SPACE = 10 << 30
MUCH_SKEW_MS = 1000.0
SLOW_LINK_MB_S = 100.0


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def check_software() -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Check(
        "python", "pass" if sys.version_info >= (3, 11) else "fail", python, "Holdfast needs Python 3.11 or newer"
    )
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "fail", str(error), "install torch 2.11 or newer")
        return
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    good = version >= OLDEST_TORCH
    yield Check("torch", "pass" if good else "fail", torch.__version__, "" if good else "install torch 2.11 or newer")
    if torch.version.cuda is None:
        yield Check("cuda", "warn", "this torch is built for CPU only", "install a CUDA build of torch to use GPUs")
        return
    if not torch.cuda.is_available():
        advice = "is the driver installed and new enough, and did the job ask for GPUs?"
        yield Check("cuda", "warn", f"{torch.version.cuda}, but no GPU can be used", advice)
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Check("cuda", "pass", f"CUDA {torch.version.cuda}, NCCL {nccl}")


def check_cpu(probe: Probe = DEFAULT) -> Iterator[Check]:
    """Whether bf16 and fp16 products work on the CPU; some virtual machines report AMX and trap on it."""
    found = examine_amx(probe)
    facts = {
        "absent": "no AMX",
        "works": "AMX works",
        "limited": f"AMX, oneDNN limited to {onednn_limit()}",
        "traps": "AMX ends processes with SIGILL",
        "unknown": "AMX could not be tested: the test product neither finished nor trapped",
    }
    advice = f"training sets {VARIABLE}={WITHOUT_AMX} by itself; set it for other programs that use torch on this CPU"
    yield Check("cpu", "warn" if found in ("traps", "unknown") else "pass", facts[found], advice)


def check_gpus() -> Iterator[Check]:
    """Same model everywhere, and no clock held down."""
    query = "name,memory.total,clocks.sm,clocks.max.sm,driver_version,clocks_throttle_reasons.hw_slowdown"
    listed = output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    if listed is None:
        yield Check("gpus", "warn", "nvidia-smi is not here", "expected on a machine without GPUs")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    names = sorted({row[0] for row in rows})
    slow = [str(index) for index, row in enumerate(rows) if row[5] == "Active"]
    clocks = ", ".join(f"{row[2]}/{row[3]}" for row in rows)
    found = f"{len(rows)} × {' and '.join(names)}, {rows[0][1]} MiB, driver {rows[0][4]}, clocks {clocks} MHz"
    if slow:
        yield Check(
            "gpus", "fail", found, f"GPU {', '.join(slow)}: hardware slowdown is active (heat or power); drain the node"
        )
    elif len(names) > 1:
        yield Check("gpus", "warn", found, "the slowest GPU sets the pace; choose nodes with --constraint")
    else:
        yield Check("gpus", "pass", found)


def check_shared_memory(folder: Path, needed: int | None) -> Iterator[Check]:
    """The memory file system against what the snapshots of the configuration take."""
    if not folder.is_dir():
        yield Check("shared memory", "fail", f"{folder} is not a folder", "mount a tmpfs there or set snapshot_dir")
        return
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {gib(usage.free)} free of {gib(usage.total)}"
    if needed is None:
        verdict: Verdict = "warn" if usage.total <= 64 << 20 else "pass"
        advice = (
            "64 MB is a container's default; give docker --shm-size, or a memory volume" if verdict == "warn" else ""
        )
        yield Check("shared memory", verdict, found, advice)
        return
    enough = usage.free >= needed
    advice = (
        "" if enough else f"give the container --shm-size={-(-needed // 2**30)}g (or that emptyDir), or fewer snapshots"
    )
    yield Check("shared memory", "pass" if enough else "fail", f"{found}, the snapshots take {gib(needed)}", advice)


def check_folder(name: str, folder: Path) -> Iterator[Check]:
    """Locks that exclude, renames that replace, and room: what fetching and checkpoints rely on."""
    if folder.exists() and not folder.is_dir():
        yield Check(name, "fail", f"{folder} is not a folder", "choose another folder")
        return
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(existing, os.W_OK):
        yield Check(name, "fail", f"{existing} cannot be written", "choose another folder")
        return
    problems = []
    with tempfile.TemporaryDirectory(prefix=".holdfast-doctor-", dir=existing) as scratch:
        if not lock_excludes(Path(scratch)):
            problems.append("flock does not exclude (mount it with flock, e.g. Lustre -o flock)")
        if not rename_replaces(Path(scratch)):
            problems.append("rename does not replace a file that is open")
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {gib(free)} free" + ("" if folder == existing else f" (not there yet; checked in {existing})")
    if problems:
        yield Check(name, "fail", found, "; ".join(problems))
    elif free < LITTLE_SPACE:
        yield Check(name, "warn", found, "little room: checkpoints and data may not fit")
    else:
        yield Check(name, "pass", f"{found}, flock excludes, rename replaces")


def lock_excludes(folder: Path) -> bool:
    """A second process must be kept out while this one holds the lock."""
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
    """Slurm, Pyxis, Enroot, Docker, kubectl: which of them are here. None is needed to train on this machine."""
    version = output("sinfo", "--version")
    if version is None:
        yield Check("slurm", "warn", "not here", "`holdfast launch slurm` needs it; `holdfast train` does not")
    else:
        listed = output("sinfo", "-h", "-o", "%P %a %D %T")
        if listed is None:
            yield Check("slurm", "fail", f"{version}, but the controller does not answer", "ask with `scontrol ping`")
        else:
            yield Check("slurm", "pass", f"{version}; {'; '.join(listed.strip().splitlines())}")
        pyxis = "--container-image" in (output("srun", "--help") or "")
        advice = "" if pyxis else "without it --container-image is refused; see Pyxis in plugstack.conf"
        yield Check("pyxis", "pass" if pyxis else "warn", "in srun" if pyxis else "not in srun", advice)
    for program, needed in {
        "enroot": "launch image import",
        "docker": "launch image build",
        "kubectl": "launch kubernetes",
    }.items():
        path = shutil.which(program)
        advice = "" if path else f"`holdfast {needed}` needs it"
        yield Check(program, "pass" if path else "warn", path or "not here", advice)


def check_links(folders: list[Path]) -> Iterator[Check]:
    """Between the nodes of this step; outside of one there is nothing to check."""
    task = node_links.task_of_step()
    if task is None:
        return
    for link in node_links.measure(*task, folders):
        problems = []
        if abs(link.skew_ms) > MUCH_SKEW_MS:
            problems.append("the clocks differ: start chrony or ntpd")
        if link.megabytes_per_s < SLOW_LINK_MB_S:
            problems.append("slow for training over nodes: is this the wrong interface?")
        if link.locks_not_seen:
            problems.append(f"locks are not seen between nodes on {', '.join(link.locks_not_seen)}: mount with flock")
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
    parts: list[Callable[[], Iterator[Check]]] = [check_software, check_cpu, check_gpus]
    parts.append(lambda: check_shared_memory(snapshot_dir, needed))
    for name, folder in folders.items():
        parts.append(lambda name=name, folder=folder: check_folder(name, folder))  # type: ignore[misc]
    existing = [folder for folder in folders.values() if folder.is_dir()]
    parts += [check_scheduler, lambda: check_links(existing)]
    return [check for part in parts for check in part()]


def table(checks: list[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name:<{width}}  {check.found}")
        if check.advice and check.verdict != "pass":
            lines.append(f"{'':<4}  {'':<{width}}  → {check.advice}")
    return "\n".join(lines)


def output(*command: str) -> str | None:
    """What a program prints; None when it is not here, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
