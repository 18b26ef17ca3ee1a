"""The flags of the launch verbs and of `doctor`, one dataclass per verb. Imports nothing that takes time."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from holdfast.command_line.flags import positional, remainder, short
from holdfast.system.errors import UsageError


def name_value_pairs(flag: str, values: Sequence[str]) -> list[tuple[str, str]]:
    """The NAME=VALUE arguments of a flag; a value may be empty or hold further equal signs."""
    pairs = []
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name or any(c.isspace() for c in name):
            raise UsageError(f"{flag} '{text}' is not NAME=VALUE")
        pairs.append((name, value))
    return pairs


@dataclass(frozen=True)
class ClusterOptions:
    """Flags that Slurm and Kubernetes jobs share."""

    nodes: int = 1
    """Nodes of the training job, or how many partitions are preprocessed at the same time."""
    gpus_per_node: int | None = None
    """GPUs per node; training starts one rank for each."""
    env: tuple[str, ...] = ()
    """NAME=VALUE pairs for the environment of the job."""
    dry_run: bool = False
    """Print the batch files or manifests, and submit nothing."""
    json: bool = False
    """Print the job ids as JSON; with --dry-run, or for Kubernetes, the batch files or manifests."""
    command: tuple[str, ...] = field(default=(), metadata=remainder("train|preprocess ..."))
    """The verb to run, with its own arguments and flags."""


@dataclass(frozen=True)
class SlurmOptions(ClusterOptions):
    """Submit `holdfast train` or `holdfast preprocess` as a Slurm job that requeues itself and continues.

    Every flag of the verb is accepted too; the flags below are those of the job. The batch file stays in RUN/launch.

    Examples:

      holdfast launch slurm train gpt2_345m --data-path /fsx/data/corpus_text_document \\
          --save /fsx/runs/345m --nodes 4 --gpus-per-node 8 --time 12:00:00
      holdfast launch slurm train my.toml --save runs/my --nodes 2 --gpus-per-node 8 --dry-run
      holdfast launch slurm preprocess --input '/fsx/*.jsonl' --output-prefix /fsx/corpus \\
          --vocab-file gpt2 --append-eod --nodes 4 --partitions 64
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "nodes": "resources",
        "cpus_per_task": "resources",
        "env": "environment",
        "modules": "environment",
        "job_name": "job",
        "dry_run": "result",
    }

    cpus_per_task: int | None = None
    """CPU cores per node (one task runs on each)."""
    mem: str | None = None
    """Memory per node, e.g. 200G; 0 is all of it."""
    partition: str | None = None
    """Partition (queue) of the cluster."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit in Slurm's format: minutes, H:M:S or D-H:M:S. The next job continues the run."""
    exclusive: bool = False
    """Reserve whole nodes."""
    constraint: str | None = None
    """Features that the nodes must have."""
    reservation: str | None = None
    """Reservation to use."""
    array: str | None = None
    """Preprocess: partitions to run instead of all, e.g. 3,7-9%2."""
    dependency: str | None = None
    """Start after other jobs, e.g. afterok:123."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    prolog: tuple[str, ...] = ()
    """Lines of shell to run first, e.g. 'source /apps/venv/bin/activate'."""
    container_image: str | None = None
    """Image for Pyxis: a .sqsh file or a registry address. Unset: $IMAGE, else $APPS_PATH/holdfast.sqsh if it exists."""
    container_mounts: str | None = None
    """SOURCE:TARGET,... for Pyxis. Unset: $DATA_PATH and the folder of every path of the job, each under its own name."""
    sbatch: tuple[str, ...] = ()
    """Further options for #SBATCH lines, e.g. --sbatch=--mail-type=END."""
    job_name: str | None = None
    """Name in the queue. Unset: that of the run folder."""
    requeue: bool = True
    """Requeue the job after preemption, a lost node or the time limit."""
    max_requeues: int = 20
    """Requeues after which the job fails."""
    signal_seconds: int = 300
    """Seconds before the time limit at which the run persists and the job requeues itself. Slurm may be a minute early."""


@dataclass(frozen=True)
class KubernetesOptions(ClusterOptions):
    """Render `holdfast train` or `holdfast preprocess` as a Kubernetes job; --apply gives it to kubectl.

    Every flag of the verb is accepted too; the flags below are those of the job. A node is a pod, and
    paths are those inside the pods.

    Examples:

      holdfast launch kubernetes train gpt2_345m --data-path /fsx/data/corpus_text_document \\
          --vocab-size 50257 --save /fsx/runs/gpt2-345m --nodes 4 --gpus-per-node 8 \\
          --image registry.example/holdfast:0.1.0 --pvc fsx-claim:/fsx
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "nodes": "resources",
        "cpus": "resources",
        "kind": "job",
        "env": "environment",
        "image": "environment",
        "node_selector": "job",
        "dry_run": "result",
        "apply": "result",
    }

    cpus: str | None = None
    """CPU cores per pod."""
    mem: str | None = None
    """Memory per pod, e.g. 200Gi; includes /dev/shm."""
    efa: int = 0
    """Elastic Fabric Adapters per pod (AWS)."""
    kind: Literal["job", "jobset", "pytorchjob", "trainjob"] = "job"
    """Indexed Job, JobSet, Kubeflow's PyTorchJob (training operator) or TrainJob (trainer v2)."""
    name: str | None = None
    """Name of the job. Unset: that of the run folder, with `run-` in front of a digit."""
    namespace: str = "default"
    """Namespace of all objects."""
    image: str | None = None
    """Container image, e.g. registry.example/holdfast:0.1.0. Unset: $IMAGE."""
    pvc: tuple[str, ...] = ()
    """CLAIM:/PATH pairs: volume claims and where they are mounted. Data and run folder must be on them."""
    shm: str | None = None
    """Size of /dev/shm, e.g. 64Gi. Unset: what the snapshots of this configuration need."""
    node_selector: tuple[str, ...] = ()
    """LABEL=VALUE pairs that the nodes must have."""
    backoff_limit: int = 20
    """Restarts of pods after which the job fails; --max-restarts of train counts those of the ranks inside a pod."""
    apply: bool = False
    """Create the objects with kubectl. Unset: print them."""

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
        return {"image": os.environ["IMAGE"]} if "IMAGE" in os.environ else {}


@dataclass(frozen=True)
class DaskOptions:
    """Run `holdfast preprocess` on the workers of a Dask cluster; waits for the end and prints what preprocess prints.

    Every flag of preprocess is accepted too. The workers need Holdfast and the same file system.

    Examples:

      holdfast launch dask preprocess --scheduler tcp://head:8786 --partitions 64 \\
          --input '/fsx/*.jsonl' --output-prefix /fsx/corpus --vocab-file gpt2 --append-eod
    """

    scheduler: str
    """Address of the scheduler, e.g. tcp://head:8786."""
    nodes: int = 4
    """Number of partitions if --partitions is not given."""
    command: tuple[str, ...] = field(default=(), metadata=remainder("preprocess ..."))
    """The verb to run, with its own arguments and flags."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Build the container image with Docker, or import it with Enroot into the .sqsh file that Slurm jobs start from.

    Examples:

      holdfast launch image build --efa 1.48.0 --dry-run
      holdfast launch image import --output /apps/holdfast.sqsh
    """

    action: Literal["build", "import"] = field(metadata=positional())
    """Build the Docker image, or import it into a squash file."""
    tag: str = "holdfast:latest"
    """Name of the Docker image."""
    context: Path | None = None
    """Checkout to build from. Unset: the one that this program runs from."""
    base: str | None = None
    """Base image, instead of the pinned one."""
    efa: str | None = None
    """Version of AWS's EFA installer to put into the image. Unset: none."""
    output: Path | None = None
    """Squash file. Unset: $APPS_PATH/holdfast.sqsh."""
    dry_run: bool = False
    """Print the commands and run nothing."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRunOptions:
    """Flags of the verbs about a run that was launched."""

    run: Path = field(metadata=positional())
    """The run folder."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class StatusOptions(LaunchedRunOptions):
    """Show the state of a launched run: its jobs in the queue, and its progress.

    Examples:

      holdfast launch status /fsx/runs/345m
      holdfast launch status /fsx/runs/345m --watch
    """

    watch: bool = False
    """Ask again every five seconds, until Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class LogsOptions(LaunchedRunOptions):
    """Show what the jobs of a run print.

    Examples:

      holdfast launch logs -f /fsx/runs/345m
    """

    follow: bool = field(default=False, metadata=short("-f"))
    """Continue until no job of the run is active."""
    json: bool = False
    """Print each line as a JSON object: job, file, line."""


@dataclass(frozen=True, kw_only=True)
class StopOptions(LaunchedRunOptions):
    """End a run's jobs; training persists its state first. `launch resume` continues from there.

    Examples:

      holdfast launch stop /fsx/runs/345m
    """

    now: bool = False
    """Cancel at once; training has only Slurm's KillWait to persist its state."""
    timeout: float = 600.0
    """Seconds to wait for the job to end before it is cancelled."""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(LaunchedRunOptions):
    """Submit a stopped run again; it continues from its newest state.

    Examples:

      holdfast launch resume /fsx/runs/345m
    """


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this machine for a job: software, GPUs, shared memory, file systems, schedulers; under srun also the links.

    Exits with 1 if a check fails.

    Examples:

      holdfast doctor
      holdfast doctor gpt2_345m --folder /fsx
      srun --nodes 4 --ntasks-per-node 1 holdfast doctor --folder /fsx
    """

    config: Path | None = field(default=None, metadata=positional())
    """Configuration whose folders and snapshot memory are checked."""
    folder: tuple[Path, ...] = ()
    """Further folders that the job uses."""
    json: bool = False
    """Print the checks as JSON."""
