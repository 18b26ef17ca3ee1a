"""Slurm's commands sbatch, sinfo, squeue, scontrol and scancel. They need no accounting database, which many sites do not have.

The invariant: no job is submitted that Slurm would refuse; `check` asks first and reports Slurm's own reason.
"""

import re
import shutil
import subprocess
from pathlib import Path

from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import count_of

# States of jobs that have not ended. Slurm forgets ended jobs after MinJobAge (five minutes on most sites).
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
            f"{command[0]} is not installed here: run this where Slurm's commands are, e.g. on the login node"
        )
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def require(*command: str) -> str:
    done = call(*command)
    if done.returncode:
        raise HoldfastError(f"{command[0]} failed: {reason(done.stderr)}")
    return done.stdout.strip()


def reason(stderr: str) -> str:
    """Slurm's error message, without its prefixes."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or "it gave no reason"


def check(script: str) -> None:
    """Asks the controller whether it would accept this batch file, without submitting it."""
    done = call("sbatch", "--test-only", text=script)
    if done.returncode == 0:
        return
    why = reason(done.stderr)
    require_controller(why)
    if "partition" in why.lower():
        why += f" (there are: {', '.join(partitions()) or 'none'})"
    raise HoldfastError(f"Slurm would refuse this job: {why}; nothing was submitted")


def require_controller(why: str) -> None:
    """Raises an error if a command failed because no controller answers."""
    if any(text in why for text in UNREACHABLE):
        last = why.split("; ")[-1]
        raise HoldfastError(f"Slurm's controller cannot be reached from this machine ({last}); use a login node")


def partitions() -> list[str]:
    return sorted({name.rstrip("*") for name in call("sinfo", "-h", "-o", "%P").stdout.split()})


def check_times(partition: str | None, limit: str | None, warning: int | None) -> None:
    """Refuses a limit above the partition's, with which the job would never start, and a signal so early that the job would
    requeue for ever. `warning`: seconds before the limit at which Slurm signals the job."""
    if limit is None:
        return
    seconds = seconds_of(limit)
    if seconds is not None and warning is not None and warning + 60 > seconds:
        raise UsageError(
            f"--signal-seconds {warning} leaves no time to train of --time {limit} ({count_of(seconds // 60, 'minute')}), "
            "because Slurm may send the signal a minute early; give more time"
            + (f", or --signal-seconds {seconds - 120} or less" if seconds > 120 else "")
        )
    longest = longest_time(partition)
    if longest is not None and (seconds is None or seconds > longest):
        raise HoldfastError(
            f"--time {limit} is more than the partition allows ({count_of(longest // 60, 'minute')}): the job would "
            "never start"
        )


def longest_time(partition: str | None) -> int | None:
    """Time limit of the partition (or of the default one) in seconds; None if it has no limit or does not exist."""
    for line in call("sinfo", "-h", "-o", "%P %l").stdout.splitlines():
        name, limit = line.split()
        if name.rstrip("*") == partition or (partition is None and name.endswith("*")):
            return seconds_of(limit)
    return None


def seconds_of(limit: str) -> int | None:
    """Seconds of a time in Slurm's formats: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None if there is no limit."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, clock = limit.rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        day = int(days) if dash else 0
    except ValueError:
        parts, day = [], 0
    if not 1 <= len(parts) <= 3:
        raise UsageError(f"--time {limit} is not a time in Slurm's format: give minutes, H:M:S or D-H:M:S")
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return (day * 86400 + hours * 3600 + minutes * 60 + seconds) or None  # to Slurm, 0 is no limit


def submit(script: Path, after: str | None = None) -> str:
    """Submits a batch file and returns the job id. `after`: start when that job succeeds, and drop it when that job fails."""
    extra = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return require("sbatch", "--parsable", *extra, str(script)).split(";")[0]


def jobs(job: str) -> list[dict[str, str]]:
    """The records of scontrol: one, or one for each task of an array that was split off; none for a forgotten job."""
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
    """The time left as squeue prints it; empty if the job is not in the queue."""
    return call("squeue", "-h", "-j", job, "-o", "%L").stdout.split("\n")[0].strip()


def cancel(job: str) -> None:
    require("scancel", job)
