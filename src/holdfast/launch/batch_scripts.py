"""The text of Slurm batch files: plain bash that a user can read, edit and submit by hand.

The invariant: a batch file is complete. It needs Slurm, bash and the run folder, and nothing else of the machine that submitted
it. It may start any number of times (requeue, resume), and each start continues where the last one stopped.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from holdfast.launch.options import SlurmOptions, name_value_pairs
from holdfast.launch.preprocessing_job import PreprocessingJob
from holdfast.launch.training_job import TrainingJob
from holdfast.system.errors import UsageError
from holdfast.system.progress import count_of

ACCEPT_SKIPPED_LINES = "code=$?; [ $code = 3 ] || exit $code  # 3: done, and bad lines were skipped as asked"

# On a node with an Elastic Fabric Adapter, libfabric must use it.
USE_EFA = """\
for device in /sys/class/infiniband/*; do
  case "$(readlink -f "$device/device/driver")" in */efa) export FI_PROVIDER=efa ;; esac
done
"""


def launch_folder(run: Path) -> Path:
    """The folder of a run's batch files, their output, and the record of submissions."""
    return run / "launch"


def program(options: SlurmOptions) -> list[str]:
    """How the job calls Holdfast: by name inside the image, with this Python interpreter elsewhere."""
    return ["holdfast"] if options.container_image else [sys.executable, "-m", "holdfast.cli"]


def train_script(options: SlurmOptions, job: TrainingJob) -> str:
    """One task per node runs `holdfast train`, which starts and restarts the node's ranks."""
    if options.array:
        raise UsageError("--array is for preprocess: the tasks of an array would all train in the same run folder")
    train = [*program(options), "train", str(job.run / "config.toml"), "--nnodes", str(options.nodes)]
    node = f'{USE_EFA}exec {shlex.join(train)} --node-rank "$SLURM_NODEID" --rdzv-endpoint "$MASTER:$PORT"'
    fetch = f"{step(options)} {shlex.join([*program(options), 'fetch', *job.assets])} || exit 1"
    parts = {
        "RUN": shlex.quote(str(job.run)),
        "ITERATIONS": str(job.iterations),
        "MAX_REQUEUES": str(options.max_requeues if options.requeue else 0),
        "STOP_SECONDS": str(max(1, options.signal_seconds // 2)),
        "SETUP": "\n".join(setup(options)),
        "RESOLVED": f"{count_of(options.nodes, 'node')} x {count_of(job.nproc_per_node, 'rank')}: {job.layout.words()}",
        "FETCH": f"# once, before the ranks need them\n{fetch}" if job.assets else "",
        "TRAIN": f"{step(options)} bash -c {shlex.quote(node)}",
    }
    body = Path(__file__).with_name("train_job.sh").read_text(encoding="utf-8")
    for name, text in parts.items():
        body = body.replace(f"@{name}@", text)
    about = f"# Trains in {job.run}; every start continues from the newest state there."
    return "\n".join([*header(options, job.run, "%j", signal=True), about, "", body])


def preprocess_scripts(options: SlurmOptions, job: PreprocessingJob) -> dict[str, str]:
    """File name → batch file, in the order of their start: an array that makes the partitions, and a job that joins them.

    The verb itself skips a partition that is finished. A single partition needs no array.
    """
    command = f"{step(options)} {shlex.join([*program(options), *job.command])}"

    def script(header: list[str], about: str, command: str) -> str:
        return "\n".join([*header, f"# {about}", "", *setup(options), command, ACCEPT_SKIPPED_LINES, ""])

    scripts = {}
    if job.partitions > 1:
        tasks = options.array or f"0-{job.partitions - 1}%{options.nodes}"
        scripts["preprocess.sbatch"] = script(
            header(options, job.run, "%A_%a", array=tasks),
            f"Makes partition $SLURM_ARRAY_TASK_ID of {job.partitions}; merge.sbatch joins them.",
            f'{command} --partition-index "$SLURM_ARRAY_TASK_ID"',
        )
    scripts["merge.sbatch"] = script(
        header(replace(options, nodes=1, dependency=None), job.run, "%j"),
        "Joins the partitions that preprocess.sbatch made.",
        command,
    )
    return scripts


def header(
    options: SlurmOptions, run: Path, output: str, *, array: str | None = None, signal: bool = False
) -> list[str]:
    """The shebang and the #SBATCH lines. `signal`: Slurm sends USR1 to the batch shell before the time limit."""
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
        "output": f"{output_folder(run)}/slurm-{output}.out",
    }
    lines = [f"--{name}={value}" for name, value in values.items() if value is not None]
    lines += ["--exclusive"] * options.exclusive
    lines += ["--open-mode=append", "--requeue" if options.requeue else "--no-requeue"]
    lines += [f"--signal=B:USR1@{options.signal_seconds}"] * (signal and options.requeue)
    lines += options.sbatch
    for line in lines:
        if "\n" in line or not line.startswith("-"):
            raise UsageError(f"'{line}' is not a valid #SBATCH line: give an option such as '--mail-type=END'")
    return ["#!/bin/bash", *(f"#SBATCH {quoted(line)}" for line in lines)]


def output_folder(run: Path) -> str:
    """The folder of the output as Slurm reads a file name: %% is a percent sign, and a backslash ends all replacements."""
    folder = str(launch_folder(run))
    if "\\" in folder:
        raise UsageError(
            f"{run} holds a backslash, which Slurm takes out of the name of the output: choose another folder"
        )
    return folder.replace("%", "%%")


def quoted(line: str) -> str:
    """The option as sbatch reads it: a value with special characters is in double quotes."""
    name, equals, value = line.partition("=")
    if not equals or not any(character in value for character in " \t#\"'\\"):
        return line
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


def setup(options: SlurmOptions) -> list[str]:
    """Shell lines before the first step: modules, the user's prolog, environment."""
    lines = [f"module load {shlex.quote(module)}" for module in options.modules]
    lines += options.prolog
    for name, value in name_value_pairs("--env", options.env):
        if not (name.isascii() and name.isidentifier()):
            raise UsageError(f"--env {name}={value}: {name} is not a valid variable name")
        lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def step(options: SlurmOptions) -> str:
    """The srun command: one task per node, in the container if there is one."""
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    # Since Slurm 22.05 a step does not inherit the job's cores per task.
    words += [f"--cpus-per-task={options.cpus_per_task}"] * bool(options.cpus_per_task)
    if options.container_image:
        words += [f"--container-image={options.container_image}", "--no-container-mount-home"]
        words += [f"--container-mounts={options.container_mounts}"] * bool(options.container_mounts)
    return shlex.join(words)
