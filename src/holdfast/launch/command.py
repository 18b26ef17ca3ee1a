"""The verbs `launch slurm|kubernetes|image|status|logs|stop|resume` and `doctor`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.command_line import flags
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

LEAST = {
    "nodes": 1,
    "gpus_per_node": 0,
    "cpus_per_task": 1,
    "efa": 0,
    "max_requeues": 0,
    "max_restarts": 0,
    "signal_seconds": 1,
    "timeout": 0,
}


def run_verb(where: str, options: Any, verbs: Mapping[str, Callable[[Any, Sequence[str]], None]]) -> None:
    """Calls the launcher of the verb that the command line names, with the arguments of that verb."""
    from holdfast.cli import VERBS, load

    check_counts(options)
    name, *arguments = options.command or ("",)
    if name not in verbs:
        problem = f"cannot launch '{name}'" if name else "nothing to launch"
        raise UsageError(
            f"{problem}; launch one of: {', '.join(verbs)} (holdfast launch {where} --help shows examples)"
        )
    own = flags.options_of(load(VERBS[name][0]))
    flags.check_known(arguments, f"holdfast launch {where} {name}", type(options), own)
    verbs[name](options, arguments)


def check_counts(options: Any) -> None:
    """Refuses numbers that no job can have."""
    for name, least in LEAST.items():
        value = getattr(options, name, None)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give {least} or more")


def launch_slurm(options: SlurmOptions) -> None:
    run_verb("slurm", options, {"train": slurm_train, "preprocess": slurm_preprocess})


def slurm_train(options: SlurmOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch import containers, slurm
    from holdfast.launch.batch import Training, train_script
    from holdfast.launch.plan import plan_training

    plan = plan_training(arguments, options.nodes, options.gpus_per_node)
    slurm.check_times(options.partition, options.time, options.signal_seconds if options.requeue else None)
    options = containers.complete(options, plan.paths())
    ranks = plan.config.parallel.nproc_per_node
    training = Training(plan.run, plan.run / "config.toml", plan.iterations, ranks, plan.layout.words(), plan.assets)
    scripts = {"train.sbatch": train_script(options, training)}
    if options.dry_run:
        show_scripts(scripts, options.json)
        return
    slurm.check(scripts["train.sbatch"])
    from holdfast.train.checks.preflight import open_run_folder

    with open_run_folder(plan.config):
        pass  # the job claims the folder again when it starts
    submit_scripts(plan.run, scripts, options.json)


def slurm_preprocess(options: SlurmOptions, arguments: Sequence[str]) -> None:
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
        show_scripts(scripts, options.json)
        return
    for script in scripts.values():
        slurm.check(script)
    submit_scripts(sharing.run, scripts, options.json)


def show_scripts(scripts: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json({"scripts": scripts})
    else:
        print("\n".join(scripts.values()), end="")


def submit_scripts(run: Path, scripts: dict[str, str], as_json: bool) -> None:
    """Keeps the files in the run folder, submits them, and prints how to follow the jobs."""
    from holdfast.launch import control
    from holdfast.launch.batch import launch_folder
    from holdfast.system.atomic_files import publish_text

    for name, text in scripts.items():
        publish_text(launch_folder(run) / name, text)
    jobs = control.submit(run, list(scripts))
    log(f"submitted {', '.join(f'{name} as job {job}' for name, job in zip(scripts, jobs, strict=True))}")
    log(f"follow it with: holdfast launch status {run}   or   holdfast launch logs -f {run}")
    show_jobs(run, jobs, as_json)


def show_jobs(run: Path, jobs: list[str], as_json: bool) -> None:
    if as_json:
        print_json({"run": str(run), "jobs": jobs})
    else:
        print("\n".join(jobs))


def launch_kubernetes(options: KubernetesOptions) -> None:
    if options.command and not options.image:
        raise UsageError("give the container image with --image, or set $IMAGE")
    run_verb("kubernetes", options, {"train": kubernetes_train, "preprocess": kubernetes_preprocess})


def kubernetes_train(options: KubernetesOptions, arguments: Sequence[str]) -> None:
    from holdfast.config import config_to_toml
    from holdfast.launch import kubernetes
    from holdfast.launch.plan import plan_training, snapshot_bytes

    plan = plan_training(arguments, options.nodes, options.gpus_per_node or None, here=False)
    kubernetes.check_options(options)
    kubernetes.require_on_claims(options, plan.paths())
    shm = options.shm or f"{-(-snapshot_bytes(plan) // 2**30) + 1}Gi"
    name = kubernetes.object_name(options.name or plan.run.name)
    config = config_to_toml(plan.config)
    show(options, kubernetes.train_manifests(options, name, config, plan.config.parallel.nproc_per_node, shm))


def kubernetes_preprocess(options: KubernetesOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch import kubernetes
    from holdfast.launch.sharing import share_preprocessing

    sharing = share_preprocessing(arguments, options.nodes, here=False)
    kubernetes.check_options(options)
    kubernetes.require_on_claims(options, sharing.paths)
    name = kubernetes.object_name(options.name or Path(sharing.output_prefix).name)
    show(options, kubernetes.preprocess_manifests(options, name, sharing.command, sharing.partitions))


def launch_dask(options: DaskOptions) -> None:
    run_verb("dask", options, {"preprocess": dask_preprocess})


def dask_preprocess(options: DaskOptions, arguments: Sequence[str]) -> None:
    from holdfast.launch.dask_cluster import run_partitions
    from holdfast.launch.sharing import share_preprocessing

    print(run_partitions(options.scheduler, share_preprocessing(arguments, options.nodes)), end="")


def show(options: KubernetesOptions, manifests: list[dict[str, Any]]) -> None:
    from holdfast.launch import kubernetes

    if options.apply and options.dry_run:
        raise UsageError("--apply and --dry-run exclude each other")
    if options.json:
        print_json(manifests)
    elif not options.apply:
        print(kubernetes.to_yaml(manifests), end="")
    if not options.apply:
        return
    created = kubernetes.apply(manifests)
    log(created) if options.json else print(created)
    last = manifests[-1]
    where = f"--namespace {options.namespace}"
    log(f"follow it with: kubectl get {last['kind'].lower()} {last['metadata']['name']} {where}")
    log(
        f"its output:     kubectl logs --follow --selector app.kubernetes.io/instance={last['metadata']['name']} {where}"
    )


def launch_status(options: StatusOptions) -> None:
    from holdfast.launch.control import status

    found = status(options.run)
    if options.json:
        print_json(found)
        return
    for job in found["jobs"]:
        facts = [f"nodes {job['nodes']}"] * bool(job["nodes"]) + [f"{job['time_left']} left"] * bool(job["time_left"])
        facts += [count_of(job["restarts"], "restart")] * bool(job["restarts"]) + [job["detail"]] * bool(job["detail"])
        print(f"{job['script']:<18} job {job['job']:<8} {job['state']:<12} {', '.join(facts)}".rstrip())
    if found["iteration"] is not None:
        print(f"iteration {found['iteration']}, loss {found['loss']}, last event: {found['last_event']}")


def launch_logs(options: LogsOptions) -> None:
    from holdfast.launch.control import print_logs

    print_logs(options.run, options.follow)


def launch_stop(options: StopOptions) -> None:
    from holdfast.launch.control import stop

    check_counts(options)
    show_jobs(options.run, stop(options.run, options.now, options.timeout), options.json)


def launch_resume(options: ResumeOptions) -> None:
    from holdfast.launch.control import resume

    jobs = resume(options.run)
    log(f"submitted again; follow it with: holdfast launch status {options.run}")
    show_jobs(options.run, jobs, options.json)


def launch_image(options: ImageOptions) -> None:
    from holdfast.launch import images

    if options.action == "build":
        context = images.checkout(options.context)
        result = images.build(options.tag, context, options.base, options.efa, options.dry_run)
    else:
        result = images.import_image(options.tag, options.output or images.default_squash_file(), options.dry_run)
    if options.json:
        print_json({"commands" if options.dry_run else "image": result if options.dry_run else result[0]})
    else:
        print("\n".join(result))


def doctor(options: DoctorOptions) -> None:
    from holdfast.launch.doctor import examine, table
    from holdfast.launch.plan import job_needs

    folders, snapshot_dir, needed = job_needs(options.config)
    folders |= {f"folder {path}": path for path in options.folder}
    checks = examine(folders, snapshot_dir, needed)
    if int(os.environ.get("SLURM_PROCID", "0")):
        return  # only node 0 of the step reports
    if options.json:
        from dataclasses import asdict

        print_json([asdict(check) for check in checks])
    else:
        print(table(checks))
    if any(check.verdict == "fail" for check in checks):
        sys.exit(1)


def print_json(value: object) -> None:
    import orjson

    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
