"""A launched run after its submission: where it stands, what it prints, how it stops and goes on.

The record is `launch/jobs.jsonl` in the run folder: `submit` writes a line for every job, the batch file one for each start and
end. What Slurm has forgotten is answered from there.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.launch import slurm
from holdfast.launch.batch import launch_folder
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal, read_journal
from holdfast.system.progress import log

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class JobState:
    """One job of the run, as it is now."""

    script: str
    job: str
    state: str
    detail: str = ""
    nodes: str = ""
    restarts: int = 0
    time_left: str = ""

    @property
    def active(self) -> bool:
        return any(word in slurm.ACTIVE for word in self.state.replace(",", " ").split())


def record_file(run: Path) -> Path:
    return launch_folder(run) / "jobs.jsonl"


def submit(run: Path, scripts: list[str]) -> list[str]:
    """Submits batch files of the run folder, each to start when the one before it has ended well."""
    ids: list[str] = []
    journal = Journal(record_file(run))
    for path in [launch_folder(run) / script for script in scripts]:
        ids.append(slurm.submit(path, after=ids[-1] if ids else None))
        journal.event("submitted", job=ids[-1], script=path.name)
    journal.close()
    return ids


def submitted(run: Path) -> dict[str, str]:
    """Batch file → the job it was last submitted as."""
    if not run.is_dir():
        raise HoldfastError(f"{run} is not a folder; give the run folder: that of --save, or PREFIX.run of preprocess")
    found = {r["script"]: r["job"] for r in read_journal(record_file(run)) if r.get("event") == "submitted"}
    if not found:
        raise HoldfastError(f"{run} was not launched from here: there is no submission in {record_file(run)}")
    return found


def job_states(run: Path) -> list[JobState]:
    return [job_state(run, script, job) for script, job in submitted(run).items()]


def job_state(run: Path, script: str, job: str) -> JobState:
    records = slurm.jobs(job)
    own = [r for r in read_journal(record_file(run)) if r.get("job") == job and r.get("event") != "submitted"]
    last = f"{own[-1]['event']}: {own[-1]['detail']}" if own else ""
    if not records:
        return JobState(
            script,
            job,
            "ENDED",
            last or "Slurm no longer knows the job, and the job recorded no end",
            restarts=len(own) and own[-1]["restart"],
        )
    states = [record.get("JobState", "?") for record in records]
    counts = ", ".join(f"{states.count(s)} {s}" if len(states) > 1 else s for s in dict.fromkeys(states))
    first = records[0]
    waits = first.get("Reason", "None") if states[0] == "PENDING" else "None"
    return JobState(
        script,
        job,
        counts,
        f"waits: {waits}" if waits != "None" else last,
        ",".join(nodes for r in records if (nodes := r.get("NodeList", "(null)")) != "(null)"),
        sum(int(record.get("Restarts", 0)) for record in records),
        slurm.time_left(job) if states[0] in slurm.ACTIVE else "",
    )


def status(run: Path) -> dict[str, Any]:
    """Everything `launch status` shows: the jobs, and how far the run itself came."""
    metrics = list(read_journal(run / "metrics.jsonl"))[-1:]
    events = list(read_journal(run / "events.jsonl"))[-1:]
    return {
        "run": str(run),
        "jobs": [asdict(state) for state in job_states(run)],
        "iteration": metrics[0].get("iteration") if metrics else None,
        "loss": metrics[0].get("loss") if metrics else None,
        "last_event": events[0].get("event") if events else None,
    }


def outputs(run: Path) -> list[Path]:
    """The output files of the jobs that were submitted last."""
    jobs = list(submitted(run).values())
    files = sorted(launch_folder(run).glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    return [path for path in files if path.stem.removeprefix("slurm-").split("_")[0] in jobs]


def print_logs(run: Path, follow: bool) -> None:
    """What the jobs printed, file after file; with `follow` also what comes, until no job is active."""
    printed = False
    for chunk in log_chunks(run, follow):
        sys.stdout.write(chunk)
        sys.stdout.flush()
        printed = True
    if not printed:
        log(f"no job of {run} has printed anything yet; `holdfast launch status {run}` shows where they are")


def log_chunks(run: Path, follow: bool) -> Iterator[str]:
    offsets: dict[Path, int] = {}
    shown: Path | None = None
    while True:
        going_on = follow and any(state.active for state in job_states(run))
        files = outputs(run)
        for path in files:
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                chunk = file.read()
            if not chunk:
                continue
            offsets[path] = offsets.get(path, 0) + len(chunk)
            if len(files) > 1 and path != shown:
                yield f"==> {path.name} <==\n"
            shown = path
            yield chunk.decode(errors="replace")
        if not going_on:
            return
        time.sleep(POLL_SECONDS)


def stop(run: Path, now: bool, timeout: float) -> list[str]:
    """Ends the run's jobs. Training that runs is asked to persist and leave first; what outlives `timeout` is cancelled."""
    active = [state for state in job_states(run) if state.active]
    if not active:
        raise HoldfastError(f"no job of {run} is active; `holdfast launch status {run}` shows how it ended")
    patient = [state for state in active if state.script == "train.sbatch" and "RUNNING" in state.state and not now]
    for state in active:
        if state not in patient:
            slurm.cancel(state.job)
    if patient:
        (run / "persist").touch()
        log(f"asked {run} to persist its state and stop")
    end = time.monotonic() + timeout
    while any(slurm.is_active(state.job) for state in active):
        if time.monotonic() > end:
            for state in patient:
                slurm.cancel(state.job)
            raise HoldfastError(
                f"{run} did not stop within {timeout:.0f} s and was cancelled; its newest checkpoint counts"
            )
        time.sleep(POLL_SECONDS)
    return [state.job for state in active]


def resume(run: Path) -> list[str]:
    """Submits the run's batch files again as they are; what is done already is not done again."""
    scripts = list(submitted(run))
    active = [state for state in job_states(run) if state.active]
    if active:
        raise HoldfastError(f"job {active[0].job} of {run} is {active[0].state}: it goes on by itself")
    for script in scripts:
        slurm.check((launch_folder(run) / script).read_text())
    for request in ("persist", "error.txt"):
        (run / request).unlink(missing_ok=True)
    return submit(run, scripts)
