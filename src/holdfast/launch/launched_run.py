"""A run's Slurm jobs: submit them, show their state and output, stop and resume them.

The record is `launch/jobs.jsonl` in the run folder: `submit` writes a line for every job, the batch file one for each start and
end. It answers for jobs that Slurm no longer knows.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from holdfast.command_line.results import print_json
from holdfast.launch import slurm
from holdfast.launch.batch_scripts import launch_folder
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal, read_journal
from holdfast.system.progress import log

POLL_SECONDS = 1.0
STATUS_SECONDS = 5.0
"""Between two requests of `launch status --watch` to Slurm's controller."""


@dataclass(frozen=True)
class JobState:
    """The current state of one job of the run."""

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
    """Submits batch files of the run folder, each to start when the one before it has succeeded."""
    ids: list[str] = []
    journal = Journal(record_file(run))
    for path in [launch_folder(run) / script for script in scripts]:
        ids.append(slurm.submit(path, after=ids[-1] if ids else None))
        journal.event("submitted", job=ids[-1], script=path.name)
    journal.close()
    return ids


def submitted(run: Path) -> dict[str, str]:
    """Batch file → the id of its last submission."""
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
    """What `launch status` shows: the jobs, and the progress of the run."""
    metrics = list(read_journal(run / "metrics.jsonl"))[-1:]
    events = list(read_journal(run / "events.jsonl"))[-1:]
    return {
        "run": str(run),
        "jobs": [asdict(state) for state in job_states(run)],
        "iteration": metrics[0].get("iteration") if metrics else None,
        "loss": metrics[0].get("loss") if metrics else None,
        "last_event": events[0].get("event") if events else None,
    }


def output_files(run: Path) -> list[tuple[str, Path]]:
    """(job, output file) of the jobs that were submitted last, in the order of their last line."""
    jobs = list(submitted(run).values())
    files = sorted(launch_folder(run).glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    found = [(path.stem.removeprefix("slurm-").split("_")[0], path) for path in files]
    return [(job, path) for job, path in found if job in jobs]


def print_logs(run: Path, follow: bool, as_json: bool = False) -> None:
    """What the jobs printed, file after file; with `follow` also what they print from now on, until no job is active."""
    printed: Path | None = None
    for job, path, text in new_lines(run, follow):
        if as_json:
            for line in text.removesuffix("\n").split("\n"):
                print_json({"job": job, "file": path.name, "line": line}, indent=False)
        else:
            header = f"==> {path.name} <==\n" if path != printed and len(output_files(run)) > 1 else ""
            print(header + text, end="", flush=True)
        printed = path
    if printed is None:
        log(f"no job of {run} has printed anything yet; `holdfast launch status {quote(str(run))}` shows their state")


def new_lines(run: Path, follow: bool) -> Iterator[tuple[str, Path, str]]:
    """(job, output file, text) for what was added to a file. A line that is being written waits until it is complete."""
    offsets: dict[Path, int] = {}
    while True:
        continues = follow and any(state.active for state in job_states(run))
        for job, path in output_files(run):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                added = file.read()
            if continues:
                added = added[: added.rfind(b"\n") + 1]
            if added:
                offsets[path] = offsets.get(path, 0) + len(added)
                yield job, path, added.decode(errors="replace")
        if not continues:
            return
        time.sleep(POLL_SECONDS)


def stop(run: Path, now: bool, timeout: float) -> list[str]:
    """Ends the run's jobs. Running training is asked to persist and stop first; it is cancelled after `timeout` seconds."""
    active = [state for state in job_states(run) if state.active]
    if not active:
        raise HoldfastError(f"no job of {run} is active; `holdfast launch status {quote(str(run))}` shows how it ended")
    training = [state for state in active if state.script == "train.sbatch" and "RUNNING" in state.state and not now]
    for state in active:
        if state not in training:
            slurm.cancel(state.job)
    if training:
        (run / "persist").touch()
        log(f"asked {run} to persist its state and stop")
    end = time.monotonic() + timeout
    while any(slurm.is_active(state.job) for state in active):
        if time.monotonic() > end:
            for state in training:
                slurm.cancel(state.job)
            raise HoldfastError(
                f"{run} did not stop within {timeout:.0f} s and was cancelled; it resumes from its newest checkpoint"
            )
        time.sleep(POLL_SECONDS)
    return [state.job for state in active]


def resume(run: Path) -> list[str]:
    """Submits the run's batch files again, unchanged; they continue where they stopped."""
    scripts = list(submitted(run))
    active = [state for state in job_states(run) if state.active]
    if active:
        raise HoldfastError(f"job {active[0].job} of {run} is {active[0].state}: there is nothing to resume")
    for script in scripts:
        slurm.check((launch_folder(run) / script).read_text(encoding="utf-8"))
    for request in ("persist", "error.txt"):
        (run / request).unlink(missing_ok=True)
    return submit(run, scripts)
