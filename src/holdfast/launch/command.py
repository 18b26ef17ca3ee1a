"""The verbs `launch slurm|kubernetes|dask|image|status|logs|stop|resume` and `doctor`.

A launch goes from top to bottom: the arguments of the verb become a checked job, the job becomes batch files or manifests, and
these are printed (--dry-run) or submitted.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from holdfast.command_line import flags
from holdfast.command_line.results import print_result
from holdfast.launch.options import (
    DaskOptions,
    DoctorOptions,
    ImageOptions,
    KubernetesOptions,
    LogsOptions,
    ResumeOptions,
    SlurmOptions,
    StatusOptions,
    StopOptions,
)
from holdfast.system.errors import UsageError
from holdfast.system.progress import count_of, log

if TYPE_CHECKING:
    from holdfast.config import Config

MINIMUM = {
    "nodes": 1,
    "gpus_per_node": 0,
    "cpus_per_task": 1,
    "efa": 0,
    "max_requeues": 0,
    "backoff_limit": 0,
    "signal_seconds": 1,
    "timeout": 0,
}


def launch_verb(where: str, options: Any, launchers: Mapping[str, Callable[[Any, Sequence[str]], None]]) -> None:
    """Calls the launcher of the verb that the command line names, with the arguments of that verb."""
    from holdfast.cli import VERBS, load

    check_minimums(options)
    verb, *arguments = options.command or ("",)
    if verb not in launchers:
        problem = f"cannot launch '{verb}'" if verb else "nothing to launch"
        raise UsageError(
            f"{problem}; launch one of: {', '.join(launchers)} (holdfast launch {where} --help shows examples)"
        )
    own = flags.options_of(load(VERBS[verb][0]))
    flags.check_known(arguments, f"holdfast launch {where} {verb}", type(options), own)
    launchers[verb](options, arguments)


def check_minimums(options: Any) -> None:
    """Refuses numbers that no job can have."""
    for name, minimum in MINIMUM.items():
        value = getattr(options, name, None)
        if value is not None and value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give {minimum} or more")


def launch_slurm(options: SlurmOptions) -> None:
    launch_verb("slurm", options, {"train": slurm_train, "preprocess": slurm_preprocess})


def slurm_train(options: SlurmOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch.batch_scripts import train_script
    from holdfast.launch.containers import with_container
    from holdfast.launch.slurm import check_times
    from holdfast.launch.training_job import training_job

    job = training_job(arguments, options.nodes, options.gpus_per_node)
    check_times(options.partition, options.time, options.signal_seconds if options.requeue else None)
    options = with_container(options, job.paths())
    print_or_submit(options, job.run, {"train.sbatch": train_script(options, job)}, job.config)


def slurm_preprocess(options: SlurmOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch.batch_scripts import preprocess_scripts
    from holdfast.launch.containers import with_container
    from holdfast.launch.preprocessing_job import preprocessing_job
    from holdfast.launch.slurm import check_times

    job = preprocessing_job(arguments, options.nodes)
    check_times(options.partition, options.time, None)
    options = with_container(options, job.paths)
    print_or_submit(options, job.run, preprocess_scripts(options, job))


def print_or_submit(options: SlurmOptions, run: Path, scripts: dict[str, str], config: "Config | None" = None) -> None:
    """Submits batch files, each to start after the one before it; --dry-run prints them. `config`: of a training run."""
    if options.dry_run:
        print_result({"scripts": scripts}, "\n".join(scripts.values()), options.json)
        return
    from holdfast.launch import launched_run, slurm
    from holdfast.launch.batch_scripts import launch_folder
    from holdfast.system.atomic_files import publish_text

    for script in scripts.values():
        slurm.check(script)
    if config is not None:
        from holdfast.train.run_folder.opening import open_run_folder

        with open_run_folder(config):
            pass  # writes config.toml; the job claims the folder again when it starts
    for name, text in scripts.items():
        publish_text(launch_folder(run) / name, text)
    jobs = launched_run.submit(run, list(scripts))
    log(f"submitted {', '.join(f'{name} as job {job}' for name, job in zip(scripts, jobs, strict=True))}")
    log(f"follow it with: holdfast launch status {quote(str(run))}   or   holdfast launch logs -f {quote(str(run))}")
    print_jobs(run, jobs, options.json)


def print_jobs(run: Path, jobs: list[str], as_json: bool) -> None:
    print_result({"run": str(run), "jobs": jobs}, "\n".join(jobs), as_json)


def launch_kubernetes(options: KubernetesOptions) -> None:
    if options.command and not options.image:
        raise UsageError("give the container image with --image, or set $IMAGE")
    if options.apply and options.dry_run:
        raise UsageError("--apply and --dry-run exclude each other")
    launch_verb("kubernetes", options, {"train": kubernetes_train, "preprocess": kubernetes_preprocess})


def kubernetes_train(options: KubernetesOptions, arguments: Sequence[str]) -> None:
    from holdfast.config import config_to_toml
    from holdfast.launch import kubernetes
    from holdfast.launch.training_job import training_job

    job = training_job(arguments, options.nodes, options.gpus_per_node, shared_files=False)
    kubernetes.check_options(options, job.paths())
    longest = kubernetes.LONGEST_JOBSET if options.kind in ("jobset", "trainjob") else kubernetes.LONGEST_NAME
    name = kubernetes.object_name(options.name or job.run.name, longest)
    shm = options.shm or f"{-(-job.snapshot_bytes() // 2**30) + 1}Gi"
    pods = kubernetes.TrainingPods(options, name, config_to_toml(job.config), job.nproc_per_node, shm, job.flags)
    print_or_apply(options, kubernetes.train_manifests(pods))


def kubernetes_preprocess(options: KubernetesOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch import kubernetes
    from holdfast.launch.preprocessing_job import preprocessing_job

    job = preprocessing_job(arguments, options.nodes, shared_files=False)
    kubernetes.check_options(options, job.paths)
    name = kubernetes.object_name(options.name or Path(job.output_prefix).name, kubernetes.LONGEST_PREPROCESSING)
    print_or_apply(options, kubernetes.preprocess_manifests(options, name, job.command, job.partitions))


def print_or_apply(options: KubernetesOptions, manifests: list[dict[str, Any]]) -> None:
    from holdfast.launch import kubernetes

    if not options.apply:
        print_result(manifests, kubernetes.to_yaml(manifests), options.json)
        return
    created = kubernetes.apply(manifests)
    print_result(manifests, created, options.json)
    if options.json:
        log(created)
    kind, name = manifests[-1]["kind"].lower(), manifests[-1]["metadata"]["name"]
    where = f"--namespace {options.namespace}"
    log(f"follow it with: kubectl get {kind} {name} {where}")
    log(f"its output:     kubectl logs --follow --selector app.kubernetes.io/instance={name} {where}")


def launch_dask(options: DaskOptions) -> None:
    launch_verb("dask", options, {"preprocess": dask_preprocess})


def dask_preprocess(options: DaskOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch.dask_cluster import run_partitions
    from holdfast.launch.preprocessing_job import preprocessing_job

    print(run_partitions(options.scheduler, preprocessing_job(arguments, options.nodes)), end="")


def launch_status(options: StatusOptions) -> None:
    from holdfast.launch.launched_run import STATUS_SECONDS, status

    if options.watch:
        if options.json:
            raise UsageError("--watch does not go with --json")
        from holdfast.system.live_text import watch_text

        watch_text(lambda: status_text(status(options.run)), STATUS_SECONDS)
        return
    found = status(options.run)
    print_result(found, status_text(found), options.json)


def status_text(found: Mapping[str, Any]) -> str:
    """The jobs of a run, one line each, and its progress."""
    lines = []
    for job in found["jobs"]:
        facts = [f"nodes {job['nodes']}"] * bool(job["nodes"]) + [f"{job['time_left']} left"] * bool(job["time_left"])
        facts += [count_of(job["restarts"], "restart")] * bool(job["restarts"]) + [job["detail"]] * bool(job["detail"])
        lines.append(f"{job['script']:<18} job {job['job']:<8} {job['state']:<12} {', '.join(facts)}".rstrip())
    if found["iteration"] is not None:
        lines.append(f"iteration {found['iteration']}, loss {found['loss']}, last event: {found['last_event']}")
    return "\n".join(lines)


def launch_logs(options: LogsOptions) -> None:
    from holdfast.launch.launched_run import print_logs

    print_logs(options.run, options.follow, options.json)


def launch_stop(options: StopOptions) -> None:
    from holdfast.launch.launched_run import stop

    check_minimums(options)
    print_jobs(options.run, stop(options.run, options.now, options.timeout), options.json)


def launch_resume(options: ResumeOptions) -> None:
    from holdfast.launch.launched_run import resume

    jobs = resume(options.run)
    log(f"submitted again; follow it with: holdfast launch status {quote(str(options.run))}")
    print_jobs(options.run, jobs, options.json)


def launch_image(options: ImageOptions) -> None:
    from holdfast.launch import images

    if options.action == "build":
        context = images.checkout(options.context)
        result = images.build(options.tag, context, options.base, options.efa, options.dry_run)
    else:
        result = images.import_image(options.tag, options.output, options.dry_run)
    value = {"commands": result} if options.dry_run else {"image": result[0]}
    print_result(value, "\n".join(result), options.json)


def doctor(options: DoctorOptions) -> None:
    from holdfast.launch.doctor import examine, job_needs, table

    folders, snapshot_dir, needed = job_needs(options.config)
    folders |= {f"folder {path}": path for path in options.folder}
    checks = examine(folders, snapshot_dir, needed)
    if int(os.environ.get("SLURM_PROCID", "0")):
        return  # only node 0 of the step reports
    print_result([asdict(check) for check in checks], table(checks), options.json)
    if any(check.verdict == "fail" for check in checks):
        sys.exit(1)
