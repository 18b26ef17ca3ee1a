"""The verbs `launch slurm|kubernetes|image|status|logs|stop|resume` and `doctor`."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from holdfast.errors import UsageError
from holdfast.progress import say

if TYPE_CHECKING:
    from holdfast.launch.batch import SlurmOptions
    from holdfast.launch.dask_cluster import DaskOptions
    from holdfast.launch.kubernetes import KubernetesOptions

Run = Annotated[Path, tyro.conf.Positional]

SLURM_HELP = """Submit `holdfast train` or `holdfast preprocess` as a Slurm job that comes back by itself.

  holdfast launch slurm train configs/gpt2_345m.toml --save /fsx/runs/345m --nodes 4 --gpus-per-node 8 --time 12:00:00
  holdfast launch slurm train CONFIG.toml --save RUN --nodes 2 --gpus-per-node 8 --container-image /apps/holdfast.sqsh --dry-run

Every flag of the verb is taken too; the flags below are the job's. The batch file stays in RUN/launch."""

KUBERNETES_HELP = """Render `holdfast train` or `holdfast preprocess` as a Kubernetes job; --apply hands it to kubectl.

  holdfast launch kubernetes train configs/gpt2_345m.toml --save /fsx/runs/345m --nodes 4 --gpus-per-node 8 \\
      --image registry.example/holdfast:0.1.0 --pvc fsx-claim:/fsx

Every flag of the verb is taken too; the flags below are the job's. Paths are those in the pods."""

DASK_HELP = """Run `holdfast preprocess` over the workers of a Dask cluster; waits for the end and prints the dataset.

  holdfast launch dask preprocess --scheduler tcp://head:8786 --partitions 64 \\
      --input '/fsx/*.jsonl' --output-prefix /fsx/corpus --vocab-file gpt2 --append-eod

The workers need Holdfast and the same file system."""


def launch_slurm(arguments: list[str]) -> None:
    from holdfast.launch.batch import SlurmOptions

    verb, options, rest = split(
        "slurm", arguments, SlurmOptions, SLURM_HELP, {"train": slurm_train, "preprocess": slurm_preprocess}
    )
    verb(options, rest)


launch_slurm.parses_its_own_arguments = True  # type: ignore[attr-defined]


def slurm_train(options: "SlurmOptions", arguments: Sequence[str]) -> None:
    from holdfast.launch import containers, slurm
    from holdfast.launch.batch import Training, train_script
    from holdfast.launch.plan import plan_training

    plan = plan_training(arguments, options.nodes, options.gpus_per_node)
    slurm.check_times(options.partition, options.time, options.signal_seconds if options.requeue else None)
    options = containers.complete(options, plan.paths())
    ranks = plan.config.parallel.nproc_per_node
    training = Training(plan.run, plan.run / "config.toml", plan.iterations, ranks, plan.layout.words(), plan.assets)
    script = train_script(options, training)
    if options.dry_run:
        print(script, end="")
        return
    slurm.check(script)
    from holdfast.train.preflight import open_run_folder

    open_run_folder(plan.config)
    submit_scripts(plan.run, {"train.sbatch": script})


def slurm_preprocess(options: "SlurmOptions", arguments: Sequence[str]) -> None:
    from holdfast.launch import containers, slurm
    from holdfast.launch.batch import array_script, merge_script
    from holdfast.launch.sharing import share_preprocessing

    sharing = share_preprocessing(arguments, options.nodes)
    slurm.check_times(options.partition, options.time, None)
    options = containers.complete(options, sharing.paths)
    scripts = {"merge.sbatch": merge_script(options, sharing.run, sharing.command)}
    if sharing.partitions > 1:
        share = array_script(options, sharing.run, sharing.command, sharing.partitions)
        scripts = {"preprocess.sbatch": share, **scripts}
    if options.dry_run:
        print("\n".join(scripts.values()), end="")
        return
    for script in scripts.values():
        slurm.check(script)
    submit_scripts(sharing.run, scripts)


def submit_scripts(run: Path, scripts: dict[str, str]) -> None:
    """Keeps the files in the run folder, submits them, and says how to follow."""
    from holdfast.launch import control
    from holdfast.launch.batch import launch_folder
    from holdfast.publish import publish_text

    for name, text in scripts.items():
        publish_text(launch_folder(run) / name, text)
    jobs = control.submit(run, list(scripts))
    say(f"submitted {', '.join(f'{name} as job {job}' for name, job in zip(scripts, jobs, strict=True))}")
    say(f"follow it with: holdfast launch status {run}   or   holdfast launch logs -f {run}")
    print("\n".join(jobs))


def launch_kubernetes(arguments: list[str]) -> None:
    from holdfast.launch.kubernetes import KubernetesOptions

    verb, options, rest = split(
        "kubernetes",
        arguments,
        KubernetesOptions,
        KUBERNETES_HELP,
        {"train": kubernetes_train, "preprocess": kubernetes_preprocess},
    )
    image = options.image or os.environ.get("IMAGE")
    if not image:
        raise UsageError("give the container image with --image, or set $IMAGE")
    verb(replace(options, image=image), rest)


launch_kubernetes.parses_its_own_arguments = True  # type: ignore[attr-defined]


def kubernetes_train(options: "KubernetesOptions", arguments: Sequence[str]) -> None:
    from holdfast.config import config_to_toml
    from holdfast.launch import kubernetes
    from holdfast.launch.plan import plan_training, snapshot_bytes

    plan = plan_training(arguments, options.nodes, options.gpus_per_node or None, here=False)
    kubernetes.require_on_claims(options, plan.paths())
    shm = options.shm or f"{-(-snapshot_bytes(plan) // 2**30) + 1}Gi"
    name = kubernetes.object_name(options.name or plan.run.name)
    config = config_to_toml(plan.config)
    show(options, kubernetes.train_manifests(options, name, config, plan.config.parallel.nproc_per_node, shm))


def kubernetes_preprocess(options: "KubernetesOptions", arguments: Sequence[str]) -> None:
    from holdfast.launch import kubernetes
    from holdfast.launch.sharing import share_preprocessing

    sharing = share_preprocessing(arguments, options.nodes, here=False)
    kubernetes.require_on_claims(options, sharing.paths)
    name = kubernetes.object_name(options.name or Path(sharing.output_prefix).name)
    show(options, kubernetes.preprocess_manifests(options, name, sharing.command, sharing.partitions))


def launch_dask(arguments: list[str]) -> None:
    from holdfast.launch.dask_cluster import DaskOptions

    verb, options, rest = split("dask", arguments, DaskOptions, DASK_HELP, {"preprocess": dask_preprocess})
    verb(options, rest)


launch_dask.parses_its_own_arguments = True  # type: ignore[attr-defined]


def dask_preprocess(options: "DaskOptions", arguments: Sequence[str]) -> None:
    from holdfast.launch.dask_cluster import run_partitions
    from holdfast.launch.sharing import share_preprocessing

    print(run_partitions(options.scheduler, share_preprocessing(arguments, options.nodes)), end="")


def show(options: "KubernetesOptions", manifests: list[dict[str, Any]]) -> None:
    from holdfast.launch import kubernetes

    if options.apply and options.dry_run:
        raise UsageError("--apply and --dry-run exclude each other")
    if not options.apply:
        print(kubernetes.to_yaml(manifests), end="")
        return
    print(kubernetes.apply(manifests))
    last = manifests[-1]
    where = f"--namespace {options.namespace}"
    say(f"follow it with: kubectl get {last['kind'].lower()} {last['metadata']['name']} {where}")
    say(
        f"its output:     kubectl logs --follow --selector app.kubernetes.io/instance={last['metadata']['name']} {where}"
    )


def split(
    where: str,
    arguments: list[str],
    options: Any,
    help_text: str,
    verbs: dict[str, Callable[[Any, Sequence[str]], None]],
) -> tuple[Callable[[Any, Sequence[str]], None], Any, list[str]]:
    """The verb to run, the job's options, and what is left for the verb itself."""
    verb = arguments[0] if arguments else "--help"
    if verb not in verbs and verb not in ("-h", "--help"):
        raise UsageError(f"cannot launch '{verb}' on {where}; launch one of: {', '.join(verbs)}")
    prog = f"holdfast launch {where} {'|'.join(verbs)}"
    own = arguments if verb in ("-h", "--help") or not arguments else arguments[1:]
    parsed, rest = tyro.cli(options, prog=prog, description=help_text, args=own or ["--help"], return_unknown_args=True)
    return verbs[verb], parsed, rest


def launch_status(run: Run, *, json: bool = False) -> None:
    """Where a launched run stands: its jobs in the queue, and how far it came.

    holdfast launch status /fsx/runs/345m

    Args:
        run: The run folder.
        json: Print it as JSON.
    """
    from holdfast.launch.control import status

    found = status(run)
    if json:
        import orjson

        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    for job in found["jobs"]:
        facts = [f"nodes {job['nodes']}"] * bool(job["nodes"]) + [f"{job['time_left']} left"] * bool(job["time_left"])
        facts += [f"{job['restarts']} restarts"] * bool(job["restarts"]) + [job["detail"]] * bool(job["detail"])
        print(f"{job['script']:<18} job {job['job']:<8} {job['state']:<12} {', '.join(facts)}".rstrip())
    if found["iteration"] is not None:
        print(f"iteration {found['iteration']}, loss {found['loss']}, last event: {found['last_event']}")


def launch_logs(run: Run, *, follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False) -> None:
    """What the jobs of a run print.

    holdfast launch logs -f /fsx/runs/345m

    Args:
        run: The run folder.
        follow: Go on until no job of the run is active.
    """
    from holdfast.launch.control import print_logs

    print_logs(run, follow)


def launch_stop(run: Run, *, now: bool = False, timeout: float = 600.0) -> None:
    """End a run's jobs; training persists its state first. `launch resume` goes on from there.

    holdfast launch stop /fsx/runs/345m

    Args:
        run: The run folder.
        now: Cancel at once; training has what Slurm's KillWait leaves it to persist.
        timeout: Seconds to wait for the end before the job is cancelled.
    """
    from holdfast.launch.control import stop

    print("\n".join(stop(run, now, timeout)))


def launch_resume(run: Run) -> None:
    """Submit a stopped run again; it goes on from its newest state.

    holdfast launch resume /fsx/runs/345m

    Args:
        run: The run folder.
    """
    from holdfast.launch.control import resume

    jobs = resume(run)
    say(f"submitted again; follow it with: holdfast launch status {run}")
    print("\n".join(jobs))


def launch_image(
    action: Annotated[Literal["build", "import"], tyro.conf.Positional],
    *,
    tag: str = "holdfast:latest",
    context: Path | None = None,
    base: str | None = None,
    efa: str | None = None,
    output: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Build the container image with Docker, or import it with Enroot into the .sqsh that Slurm jobs start from.

    holdfast launch image build --efa 1.48.0
    holdfast launch image import --output /apps/holdfast.sqsh

    Args:
        action: build the Docker image, or import it into a squash file.
        tag: Name of the Docker image.
        context: Checkout to build from. Default: the one that this program runs from.
        base: Base image, instead of the pinned one.
        efa: Version of AWS's EFA installer to put into the image. Default: none.
        output: Squash file. Default: $APPS_PATH/holdfast.sqsh.
        dry_run: Print the commands and run nothing.
    """
    from holdfast.launch import images

    if action == "build":
        images.build(tag, context or images.checkout(), base, efa, dry_run)
    else:
        images.import_image(tag, output or images.default_squash_file(), dry_run)


def doctor(
    config: Annotated[Path | None, tyro.conf.Positional] = None, *, folder: tuple[Path, ...] = (), json: bool = False
) -> None:
    """Check what a job will meet here: software, GPUs, shared memory, file systems, schedulers; under srun also the links.

    holdfast doctor
    holdfast doctor configs/gpt2_345m.toml --folder /fsx
    srun --nodes 4 --ntasks-per-node 1 holdfast doctor --folder /fsx

    Exits with 1 if a check fails.

    Args:
        config: Configuration whose folders and snapshots are checked against this machine.
        folder: Further folders that jobs will use.
        json: Print the checks as JSON.
    """
    from holdfast.launch.doctor import examine, table
    from holdfast.launch.plan import job_needs

    folders, snapshot_dir, needed = job_needs(config)
    folders |= {f"folder {path}": path for path in folder}
    checks = examine(folders, snapshot_dir, needed)
    if int(os.environ.get("SLURM_PROCID", "0")):
        return  # node 0 of the step speaks for all
    if json:
        from dataclasses import asdict

        import orjson

        print(orjson.dumps([asdict(check) for check in checks], option=orjson.OPT_INDENT_2).decode())
    else:
        print(table(checks))
    if any(check.verdict == "fail" for check in checks):
        sys.exit(1)
