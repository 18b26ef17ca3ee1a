"""The text of Slurm batch files: plain bash that a person can read, edit and submit by hand.

The invariant: a file works by itself. It needs Slurm, bash and the run folder, and nothing of what submitted it; it may be
started any number of times (requeue, resume) and each start continues where the last one stopped.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.launch.options import SlurmOptions
from holdfast.launch.pairs import pairs
from holdfast.system.errors import UsageError
from holdfast.system.progress import count_of


@dataclass(frozen=True)
class Training:
    """One training job, after everything was resolved."""

    run: Path
    config: Path
    iterations: int
    nproc_per_node: int
    layout: str
    assets: tuple[str, ...] = ()


def launch_folder(run: Path) -> Path:
    """Where a run keeps what concerns its jobs: batch files, their output, and the record of submissions."""
    return run / "launch"


def program(options: SlurmOptions) -> list[str]:
    """How the job calls Holdfast: by its own name in the image, by this very interpreter elsewhere."""
    return ["holdfast"] if options.container_image else [sys.executable, "-m", "holdfast.cli"]


def train_script(options: SlurmOptions, training: Training) -> str:
    """One task per node runs `holdfast train`, which starts and restarts the node's ranks."""
    if options.array:
        raise UsageError("--array is for preprocess: the tasks of an array would all train in the same run folder")
    train = [*program(options), "train", str(training.config), "--nnodes", str(options.nodes)]
    node = f'{USE_EFA}exec {shlex.join(train)} --node-rank "$SLURM_NODEID" --rdzv-endpoint "$MASTER:$PORT"'
    fetch = f"{step(options)} {shlex.join([*program(options), 'fetch', *training.assets])} || exit 1"
    parts = {
        "RUN": shlex.quote(str(training.run)),
        "ITERATIONS": str(training.iterations),
        "MAX_REQUEUES": str(options.max_requeues if options.requeue else 0),
        "PATIENCE": str(max(1, options.signal_seconds // 2)),
        "SETUP": "\n".join(setup(options)),
        "RESOLVED": f"{count_of(options.nodes, 'node')} x {count_of(training.nproc_per_node, 'rank')}: {training.layout}",
        "FETCH": f"# once, before the ranks ask for them\n{fetch}" if training.assets else "",
        "TRAIN": f"{step(options)} bash -c {shlex.quote(node)}",
    }
    body = Path(__file__).with_name("train_job.sh").read_text()
    for name, text in parts.items():
        body = body.replace(f"@{name}@", text)
    about = f"# Trains in {training.run}; every start continues from the newest state there."
    return "\n".join([*header(options, training.run, "%j", signal=True), about, "", body])


# Elastic Fabric Adapter: libfabric is told to use it on a node that has one.
USE_EFA = """\
for device in /sys/class/infiniband/*; do
  case "$(readlink -f "$device/device/driver")" in */efa) export FI_PROVIDER=efa ;; esac
done
"""


def array_script(options: SlurmOptions, run: Path, command: Sequence[str], partitions: int) -> str:
    """Each task of the array makes one partition; a partition that is finished is left alone by the verb itself."""
    tasks = options.array or f"0-{partitions - 1}%{options.nodes}"
    call = shlex.join([*program(options), *command])
    return "\n".join(
        [
            *header(options, run, "%A_%a", array=tasks),
            f"# Makes partition $SLURM_ARRAY_TASK_ID of {partitions}; merge.sbatch joins them.",
            "",
            *setup(options),
            f'{step(options)} {call} --partition-index "$SLURM_ARRAY_TASK_ID"',
            ACCEPT_SKIPPED_LINES,
            "",
        ]
    )


def merge_script(options: SlurmOptions, run: Path, command: Sequence[str]) -> str:
    """One task joins the partitions; submitted to start after all of the array."""
    return "\n".join(
        [
            *header(replace(options, nodes=1, dependency=None), run, "%j"),
            "# Joins the partitions that preprocess.sbatch made.",
            "",
            *setup(options),
            f"{step(options)} {shlex.join([*program(options), *command])}",
            ACCEPT_SKIPPED_LINES,
            "",
        ]
    )


ACCEPT_SKIPPED_LINES = "code=$?; [ $code = 3 ] || exit $code  # 3: done, and bad lines were skipped as asked"


def header(
    options: SlurmOptions, run: Path, output: str, *, array: str | None = None, signal: bool = False
) -> list[str]:
    """The shebang and the #SBATCH lines. `signal`: the batch shell is warned before the time limit."""
    values = {
        "job-name": options.job_name or f"holdfast-{run.name}",
        "nodes": 1 if array else options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "dependency": options.dependency,
        "array": array,
        "output": launch_folder(run) / f"slurm-{output}.out",
    }
    lines = [f"--{name}={value}" for name, value in values.items() if value is not None]
    lines += ["--exclusive"] * options.exclusive
    lines += ["--open-mode=append", "--requeue" if options.requeue else "--no-requeue"]
    lines += [f"--signal=B:USR1@{options.signal_seconds}"] * (signal and options.requeue)
    lines += options.sbatch
    for line in lines:
        if "\n" in line or not line.startswith("-"):
            raise UsageError(f"'{line}' cannot stand on an #SBATCH line: give an option such as '--mail-type=END'")
    return ["#!/bin/bash", *(f"#SBATCH {quoted(line)}" for line in lines)]


def quoted(line: str) -> str:
    """An option as sbatch reads it: the value in double quotes when it holds a space."""
    name, equals, value = line.partition("=")
    return f'{name}="{value}"' if equals and any(c in value for c in " #") else line


def setup(options: SlurmOptions) -> list[str]:
    """Shell lines before the first step: modules, the user's own, environment."""
    lines = [f"module load {shlex.quote(module)}" for module in options.modules]
    lines += options.prolog
    for name, value in pairs("--env", options.env):
        if not name.isidentifier():
            raise UsageError(f"--env: {name} cannot be the name of a variable")
        lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def step(options: SlurmOptions) -> str:
    """srun with one task per node, in the container if there is one."""
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    # Since 22.05 a step no longer inherits the job's cores per task.
    words += [f"--cpus-per-task={options.cpus_per_task}"] * bool(options.cpus_per_task)
    if options.container_image:
        words += [f"--container-image={options.container_image}", "--no-container-mount-home"]
        words += [f"--container-mounts={options.container_mounts}"] * bool(options.container_mounts)
    return shlex.join(words)
