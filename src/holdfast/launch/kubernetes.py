"""Kubernetes manifests for training and preprocessing, as plain dictionaries that become YAML.

The invariant: a container that restarts finds the snapshots that the keeper holds. Containers restart in place (`OnFailure`),
and /dev/shm is a memory volume of the pod, which outlives a container. Only a lost pod falls back to a peer or the disk.
The nodes of a job find each other by names that are known before the pods exist, so the rendezvous needs no etcd.
"""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from holdfast.launch.options import KubernetesOptions, name_value_pairs
from holdfast.launch.preprocessing_job import SKIPPED_LINES
from holdfast.system.errors import HoldfastError, UsageError

Manifest = dict[str, Any]

CONFIG_FOLDER = "/etc/holdfast"
PORT = 29500
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NOT_PLAIN = re.compile(r"[-+]?[0-9._]+(e[-+]?[0-9_]+)?|[-+]?0[xob][0-9a-f_]+|[yn]", re.IGNORECASE)
"""Texts that kubectl reads as a number or a truth value where they are not quoted, and PyYAML does not."""
LONGEST_NAME, LONGEST_JOBSET, LONGEST_PREPROCESSING = 50, 44, 38
"""Characters of a name: pods append up to five digits, those of a JobSet also the name of its job and five letters, and a host
name has 63 characters."""
RESERVED_PATHS = (CONFIG_FOLDER, "/dev/shm")
GRACE_SECONDS = 300
"""Time that a drain or preemption leaves the run to persist its state."""
COMPLETION_INDEX = {
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
}
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"


@dataclass(frozen=True)
class TrainingPods:
    """What the pods of a training job have in common, whatever kind of object starts them."""

    options: KubernetesOptions
    name: str
    config: str
    """Content of config.toml."""
    nproc_per_node: int
    shm: str
    flags: Sequence[str] = ()
    """Flags of `train` besides the configuration."""

    def template(
        self,
        container: str,
        node_rank: str,
        endpoint: str,
        command: Sequence[str] = ("holdfast",),
        environment: Manifest | None = None,
    ) -> Manifest:
        """The pod template. `node_rank` and `endpoint` may refer to environment variables as $(NAME)."""
        arguments = ["train", f"{CONFIG_FOLDER}/config.toml", "--nnodes", str(self.options.nodes)]
        arguments += ["--nproc-per-node", str(self.nproc_per_node), *self.flags]
        arguments += ["--node-rank", node_rank, "--rdzv-endpoint", endpoint]
        template = pod(self.options, self.name, container, list(command), arguments, environment or {})
        template["spec"]["volumes"] += [
            {"name": "config", "configMap": {"name": self.name}},
            # 64 MB is the default; the snapshots are here and outlive a restart of the container
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self.shm}},
        ]
        trainer = template["spec"]["containers"][0]
        trainer["volumeMounts"] += [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        trainer["ports"] = [{"containerPort": PORT, "name": "rendezvous"}]
        return template

    def indexed_template(self, first_pod: str) -> Manifest:
        """The pod template of an indexed job, where the completion index is the node's rank."""
        endpoint = f"{first_pod}.{self.name}:{PORT}"
        return self.template("train", "$(NODE_RANK)", endpoint, environment={"NODE_RANK": COMPLETION_INDEX})


def train_manifests(pods: TrainingPods) -> list[Manifest]:
    """The configuration as a ConfigMap, and the objects of the chosen kind."""
    objects = {
        "job": indexed_job,
        "jobset": job_set,
        "pytorchjob": pytorch_job,
        "trainjob": train_job,
    }[pods.options.kind]
    config_map = manifest(pods.options, "v1", "ConfigMap", pods.name, data={"config.toml": pods.config})
    return [config_map, *objects(pods)]


def indexed_job(pods: TrainingPods) -> list[Manifest]:
    options, name = pods.options, pods.name
    template = pods.indexed_template(f"{name}-0")
    template["spec"]["subdomain"] = name
    # The service gives every pod a DNS name, before the pod is ready: pods wait for each other to become ready.
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(name),
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    job = indexed(options, options.nodes, template)
    return [
        manifest(options, "v1", "Service", name, spec=service),
        manifest(options, "batch/v1", "Job", name, spec=job),
    ]


def job_set(pods: TrainingPods) -> list[Manifest]:
    options, name = pods.options, pods.name
    nodes = indexed(options, options.nodes, pods.indexed_template(f"{name}-node-0-0"))
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": options.backoff_limit},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
    }
    return [manifest(options, JOBSET_API, "JobSet", name, spec=spec)]


def pytorch_job(pods: TrainingPods) -> list[Manifest]:
    options = pods.options
    # The operator sets RANK and WORLD_SIZE per pod; a training process would read them as those of its own rank.
    command = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "holdfast"]
    template = pods.template("pytorch", "$(RANK)", "$(MASTER_ADDR):$(MASTER_PORT)", command)
    restart = template["spec"].pop("restartPolicy")
    roles = {"Master": 1, "Worker": options.nodes - 1}
    spec = {
        "nprocPerNode": str(pods.nproc_per_node),
        "runPolicy": {"backoffLimit": options.backoff_limit, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": restart, "template": template}
            for role, count in roles.items()
            if count
        },
    }
    return [manifest(options, "kubeflow.org/v1", "PyTorchJob", pods.name, spec=spec)]


def train_job(pods: TrainingPods) -> list[Manifest]:
    # The runtime carries volumes and restart policy, so that the TrainJob uses none of the fields that still change.
    options, name = pods.options, pods.name
    template = pods.template("node", "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")
    node = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"backoffLimit": options.backoff_limit, "template": template},
    }
    runtime = {
        "mlPolicy": {"numNodes": options.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": node}]}},
    }
    job = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": options.nodes},
    }
    return [
        manifest(options, TRAINER_API, "TrainingRuntime", name, spec=runtime),
        manifest(options, TRAINER_API, "TrainJob", name, spec=job),
    ]


def preprocess_manifests(
    options: KubernetesOptions, name: str, command: Sequence[str], partitions: int
) -> list[Manifest]:
    """A JobSet: an indexed job makes the partitions, and a second job joins them when all are complete."""
    if options.kind in ("pytorchjob", "trainjob"):
        raise UsageError(f"--kind {options.kind} is for training; preprocessing is a JobSet")
    command = [literal(word) for word in command]
    # To Kubernetes, a run that skipped bad lines as asked must not look like a failure.
    shell = ["/bin/sh", "-c", f'holdfast "$@" || [ $? -eq {SKIPPED_LINES} ]', "holdfast"]
    arguments = [*command, "--partition-index", "$(PARTITION)"]
    template = pod(options, name, "preprocess", shell, arguments, {"PARTITION": COMPLETION_INDEX})
    merge = pod(options, name, "merge", shell, list(command), {})
    jobs: list[Manifest] = [
        {
            "name": "partitions",
            "replicas": 1,
            "template": {"spec": {**indexed(options, partitions, template), "parallelism": options.nodes}},
        },
        {
            "name": "merge",
            "replicas": 1,
            "dependsOn": [{"name": "partitions", "status": "Complete"}],
            "template": {"spec": indexed(options, 1, merge)},
        },
    ]
    if partitions == 1:  # the join makes the dataset
        del jobs[0], jobs[0]["dependsOn"]
    spec = {"failurePolicy": {"maxRestarts": options.backoff_limit}, "replicatedJobs": jobs}
    return [manifest(options, JOBSET_API, "JobSet", name, spec=spec)]


def manifest(options: KubernetesOptions, api: str, kind: str, name: str, **content: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": options.namespace, "labels": labels(name)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/instance": name}


def indexed(options: KubernetesOptions, completions: int, template: Manifest) -> Manifest:
    """The specification of an indexed job."""
    return {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": completions,
        "backoffLimit": options.backoff_limit,
        "template": template,
    }


def volumes_of(options: KubernetesOptions) -> dict[str, tuple[str, str]]:
    """Volume → (claim, path). A claim's name may hold dots, a volume's may not: claims that differ in these only get a number."""
    found: dict[str, tuple[str, str]] = {}
    for claim, path in claim_paths(options).items():
        name = object_name(f"claim-{claim}")
        found[name if name not in found else object_name(f"claim-{len(found)}-{claim}")] = (claim, path)
    return found


def pod(
    options: KubernetesOptions,
    name: str,
    container: str,
    command: list[str],
    arguments: list[str],
    environment: Manifest,
) -> Manifest:
    """The pod template: one container with the volume claims of the job."""
    variables = [{"name": key, **value} for key, value in environment.items()]
    variables += [{"name": key, "value": literal(value)} for key, value in name_value_pairs("--env", options.env)]
    claims = [(volume, claim, path) for volume, (claim, path) in volumes_of(options).items()]
    spec: Manifest = {
        "name": container,
        "image": options.image,
        "command": command,
        "args": arguments,
        "env": variables,
        "resources": resources(options),
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, _, path in claims],
    }
    if options.efa:
        # The adapter registers memory, which needs the lock limit lifted.
        spec["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    whole: Manifest = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [spec],
        "volumes": [{"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, claim, _ in claims],
    }
    if options.node_selector:
        whole["nodeSelector"] = dict(name_value_pairs("--node-selector", options.node_selector))
    return {"metadata": {"labels": labels(name)}, "spec": whole}


def literal(text: str) -> str:
    """A text for an argument or a variable of a container, where $(NAME) is a reference to a variable and $$ is one dollar."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def resources(options: KubernetesOptions) -> Manifest:
    amounts = {
        "cpu": options.cpus,
        "memory": options.mem,
        "nvidia.com/gpu": str(options.gpus_per_node) if options.gpus_per_node else None,
        "vpc.amazonaws.com/efa": str(options.efa) if options.efa else None,
    }
    wanted = {name: amount for name, amount in amounts.items() if amount}
    return {"requests": wanted, "limits": wanted} if wanted else {}


def claim_paths(options: KubernetesOptions) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in options.pvc:
        claim, colon, path = pair.partition(":")
        if not colon or not path.startswith("/") or not all(LABEL.fullmatch(part) for part in claim.split(".")):
            raise UsageError(f"--pvc '{pair}' is not CLAIM:/PATH")
        mount = str(PurePosixPath(path))
        if mount in RESERVED_PATHS or mount in found.values() or ":" in mount:
            raise UsageError(f"--pvc '{pair}': {mount} is taken or holds a colon; mount the claim at a path of its own")
        if claim in found:
            raise UsageError(f"--pvc names the claim {claim} twice; a claim is mounted at one path")
        found[claim] = mount
    return found


def check_options(options: KubernetesOptions, paths: dict[str, str]) -> None:
    """Refuses what the API server would refuse, and paths (key → path) that are on no volume claim.

    Data and results must outlive the pods and be visible to every pod.
    """
    for flag, amount in (("--cpus", options.cpus), ("--mem", options.mem), ("--shm", options.shm)):
        if amount is not None and not QUANTITY.fullmatch(amount):
            example = "16 or 500m" if flag == "--cpus" else "200Gi or 200G"
            raise UsageError(f"{flag} {amount} is not a Kubernetes quantity; give, for example, {example}")
    if not LABEL.fullmatch(options.namespace):
        raise UsageError(
            f"--namespace {options.namespace} is not a Kubernetes name: use lower-case letters, digits and dashes"
        )
    mounts = list(claim_paths(options).values())
    for key, path in paths.items():
        if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
            where = ", ".join(mounts) or "no claim is mounted"
            raise UsageError(
                f"{key} = {path} is not on a volume claim ({where}); give --pvc CLAIM:/PATH that contains it"
            )


def object_name(text: str, longest: int = LONGEST_NAME) -> str:
    """A valid name for objects, services and hosts: it starts with a letter (RFC 1035).

    A name that is cut ends in a digest of the whole: the jobs of two runs must not be one object.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name:
        raise UsageError(f"'{text}' has no letter or digit to name the Kubernetes job by; give --name")
    if not name[0].isalpha():
        name = f"run-{name}"
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name[: longest - 9].strip('-')}-{digest}"


def to_yaml(manifests: Sequence[Manifest]) -> str:
    import yaml

    class Readable(yaml.SafeDumper):
        """Writes no aliases, and a text of several lines as a block."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else "'" if NOT_PLAIN.fullmatch(data) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Readable.add_representer(str, text)
    return yaml.dump_all(manifests, Dumper=Readable, sort_keys=False, width=120)


def apply(manifests: Sequence[Manifest]) -> str:
    """Gives the manifests to kubectl; returns its output."""
    if shutil.which("kubectl") is None:
        raise HoldfastError(
            "kubectl is not installed here; print the manifests with --dry-run and apply them elsewhere"
        )
    done = subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=to_yaml(manifests), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise HoldfastError(f"kubectl apply failed: {done.stderr.strip()}")
    return done.stdout.strip()
