"""Talks to Slurm with sbatch, squeue, scontrol and scancel: no accounting database is needed, many sites have none.

The invariant: nothing is submitted that Slurm would refuse; `check` asks it first, with its own words as the reason.
"""

import re
import shutil
import subprocess
from pathlib import Path

from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import count_of

# Slurm forgets ended jobs after MinJobAge (five minutes on most sites); these states are of jobs that will still do something.
ACTIVE = {
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "STOPPED",
    "RESIZING",
}

# How sbatch reports that it found no controller, or no configuration that names one.
UNREACHABLE = ("configuration source", "contact slurm controller", "Unable to contact")


def call(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise HoldfastError(
            f"{command[0]} is not on this machine: run this where Slurm's commands are, e.g. on the login node"
        )
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def require(*command: str) -> str:
    done = call(*command)
    if done.returncode:
        raise HoldfastError(f"{command[0]} refused: {reason(done.stderr)}")
    return done.stdout.strip()


def reason(stderr: str) -> str:
    """What Slurm said, without its prefixes."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or "it gave no reason"


def check(script: str) -> None:
    """Asks the controller whether it would take this batch file, without submitting it."""
    done = call("sbatch", "--test-only", text=script)
    if done.returncode == 0:
        return
    why = reason(done.stderr)
    require_controller(why)
    if "partition" in why.lower():
        why += f" (there are: {', '.join(partitions()) or 'none'})"
    raise HoldfastError(f"Slurm would refuse this job: {why}; nothing was submitted")


def require_controller(why: str) -> None:
    """Refuses to go on when a command failed because no controller answers."""
    if any(sign in why for sign in UNREACHABLE):
        last = why.split("; ")[-1]
        raise HoldfastError(f"Slurm's controller cannot be reached from this machine ({last}); use a login node")


def partitions() -> list[str]:
    return sorted({name.rstrip("*") for name in call("sinfo", "-h", "-o", "%P").stdout.split()})


def check_times(partition: str | None, limit: str | None, warning: int | None) -> None:
    """A limit that the partition never grants would wait for ever; a warning that comes with the start would requeue for ever."""
    seconds = seconds_of(limit) if limit else None
    if seconds is None:
        return
    if warning is not None and warning + 60 > seconds:
        raise UsageError(
            f"--signal-seconds {warning} leaves nothing of --time {limit} ({count_of(seconds // 60, 'minute')}), because "
            f"Slurm may send the signal a minute early; give more time"
            + (f", or --signal-seconds {seconds - 120} or less" if seconds > 120 else "")
        )
    longest = longest_time(partition)
    if longest is not None and seconds > longest:
        raise HoldfastError(
            f"--time {limit} is more than the partition allows ({count_of(longest // 60, 'minute')}): the job would "
            "never start"
        )


def longest_time(partition: str | None) -> int | None:
    """Seconds that a job of the partition (or of the default one) may take; None when there is no limit, or no such partition."""
    for line in call("sinfo", "-h", "-o", "%P %l").stdout.splitlines():
        name, limit = line.split()
        if name.rstrip("*") == partition or (partition is None and name.endswith("*")):
            return seconds_of(limit)
    return None


def seconds_of(limit: str) -> int | None:
    """Slurm's time formats: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None when there is no limit."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, clock = limit.rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        day = int(days) if dash else 0
    except ValueError:
        parts, day = [], 0
    if not 1 <= len(parts) <= 3:
        raise UsageError(f"--time {limit} is none of Slurm's formats: minutes, H:M:S, D-H:M:S")
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return day * 86400 + hours * 3600 + minutes * 60 + seconds


def submit(script: Path, after: str | None = None) -> str:
    """The id of the new job. `after`: it starts when that job has ended well, and is dropped when it has not."""
    extra = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return require("sbatch", "--parsable", *extra, str(script)).split(";")[0]


def jobs(job: str) -> list[dict[str, str]]:
    """What scontrol knows: one record, or one for each task of an array that was split off. Nothing when forgotten."""
    done = call("scontrol", "show", "job", "-o", job)
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return []
        require_controller(reason(done.stderr))
        raise HoldfastError(f"scontrol cannot describe job {job}: {reason(done.stderr)}")
    return [
        dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+?=|\s*$)", line)) for line in done.stdout.splitlines() if line.strip()
    ]


def is_active(job: str) -> bool:
    return any(record.get("JobState") in ACTIVE for record in jobs(job))


def time_left(job: str) -> str:
    """As squeue prints it; empty when the job is not in the queue."""
    return call("squeue", "-h", "-j", job, "-o", "%L").stdout.split("\n")[0].strip()


def cancel(job: str) -> None:
    require("scancel", job)
