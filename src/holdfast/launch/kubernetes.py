"""Kubernetes manifests for training and preprocessing, as plain dictionaries that become YAML.

The invariant: what a pod restarts into is what the keeper left. Containers restart in place (`OnFailure`), because /dev/shm is a
memory volume of the pod: it outlives a container and holds the snapshots; only a lost pod falls back to a peer or the disk.
Nodes of a job find each other by names that are known before the pods exist, so no etcd and no elastic rendezvous is needed.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from holdfast.launch.options import KubernetesOptions
from holdfast.launch.pairs import pairs
from holdfast.system.errors import HoldfastError, UsageError

Manifest = dict[str, Any]

CONFIG_FOLDER = "/etc/holdfast"
PORT = 29500
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# What a drain or preemption leaves the run to persist its state.
GRACE_SECONDS = 300


def train_manifests(
    options: KubernetesOptions, name: str, config: str, nproc_per_node: int, shm: str
) -> list[Manifest]:
    """The configuration as a ConfigMap, and the objects of the chosen kind."""
    pods = {
        "job": indexed_job,
        "jobset": job_set,
        "pytorchjob": pytorch_job,
        "trainjob": train_job,
    }[options.kind]
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(options, name),
        "data": {"config.toml": config},
    }
    return [config_map, *pods(options, name, nproc_per_node, shm)]


def indexed_job(options: KubernetesOptions, name: str, nproc_per_node: int, shm: str) -> list[Manifest]:
    rank = {"NODE_RANK": field("metadata.annotations['batch.kubernetes.io/job-completion-index']")}
    arguments = train_arguments(options, nproc_per_node, "$(NODE_RANK)", f"{name}-0.{name}:{PORT}")
    template = pod(options, name, "train", ["holdfast"], arguments, rank, shm)
    template["spec"]["subdomain"] = name
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(options, name),
        "spec": indexed(options.nodes, options.max_restarts, template),
    }
    return [headless_service(options, name), job]


def job_set(options: KubernetesOptions, name: str, nproc_per_node: int, shm: str) -> list[Manifest]:
    rank = {"NODE_RANK": field("metadata.annotations['batch.kubernetes.io/job-completion-index']")}
    arguments = train_arguments(options, nproc_per_node, "$(NODE_RANK)", f"{name}-node-0-0.{name}:{PORT}")
    template = pod(options, name, "train", ["holdfast"], arguments, rank, shm)
    replicated = {
        "name": "node",
        "replicas": 1,
        "template": {"spec": indexed(options.nodes, options.max_restarts, template)},
    }
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(options, name),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name},
                "failurePolicy": {"maxRestarts": options.max_restarts},
                "replicatedJobs": [replicated],
            },
        }
    ]


def pytorch_job(options: KubernetesOptions, name: str, nproc_per_node: int, shm: str) -> list[Manifest]:
    # The operator sets RANK and WORLD_SIZE for the pod; to a rank's process they would mean something else.
    command = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "holdfast"]
    arguments = train_arguments(options, nproc_per_node, "$(RANK)", "$(MASTER_ADDR):$(MASTER_PORT)")
    template = pod(options, name, "pytorch", command, arguments, {}, shm)
    restart = template["spec"].pop("restartPolicy")
    roles = {"Master": 1, "Worker": options.nodes - 1}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata(options, name),
            "spec": {
                "nprocPerNode": str(nproc_per_node),
                "runPolicy": {"backoffLimit": options.max_restarts, "cleanPodPolicy": "None"},
                "pytorchReplicaSpecs": {
                    role: {"replicas": count, "restartPolicy": restart, "template": template}
                    for role, count in roles.items()
                    if count
                },
            },
        }
    ]


def train_job(options: KubernetesOptions, name: str, nproc_per_node: int, shm: str) -> list[Manifest]:
    # A runtime of our own carries volumes and restart policy, so that the TrainJob needs none of the fields that still move.
    arguments = train_arguments(options, nproc_per_node, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")
    template = pod(options, name, "node", ["holdfast"], arguments, {}, shm)
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    job = {"backoffLimit": options.max_restarts, "template": template}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(options, name),
        "spec": {
            "mlPolicy": {"numNodes": options.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"metadata": step, "spec": job}}]}},
        },
    }
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(options, name),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": options.nodes},
        },
    }
    return [runtime, train]


def preprocess_manifests(
    options: KubernetesOptions, name: str, command: Sequence[str], partitions: int
) -> list[Manifest]:
    """A JobSet: one indexed job makes the partitions, a second one joins them when all are there."""
    if options.kind in ("pytorchjob", "trainjob"):
        raise UsageError(f"--kind {options.kind} is for training; preprocessing is a JobSet")
    # Code 3: done, and bad lines were skipped as asked; to Kubernetes it must not look like a failure.
    shell = ["/bin/sh", "-c", 'holdfast "$@" || [ $? -eq 3 ]', "holdfast"]
    index = {"PARTITION": field("metadata.annotations['batch.kubernetes.io/job-completion-index']")}
    template = pod(options, name, "preprocess", shell, [*command, "--partition-index", "$(PARTITION)"], index)
    join = pod(options, name, "merge", shell, list(command), {})
    jobs = [
        {
            "name": "partitions",
            "replicas": 1,
            "template": {"spec": {**indexed(partitions, options.max_restarts, template), "parallelism": options.nodes}},
        },
        {
            "name": "merge",
            "replicas": 1,
            "dependsOn": [{"name": "partitions", "status": "Complete"}],
            "template": {"spec": indexed(1, options.max_restarts, join)},
        },
    ]
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(options, name),
            "spec": {"failurePolicy": {"maxRestarts": options.max_restarts}, "replicatedJobs": jobs},
        }
    ]


def train_arguments(options: KubernetesOptions, nproc_per_node: int, node_rank: str, endpoint: str) -> list[str]:
    sizes = ["--nnodes", str(options.nodes), "--nproc-per-node", str(nproc_per_node)]
    return ["train", f"{CONFIG_FOLDER}/config.toml", *sizes, "--node-rank", node_rank, "--rdzv-endpoint", endpoint]


def pod(
    options: KubernetesOptions,
    name: str,
    container: str,
    command: list[str],
    arguments: list[str],
    environment: dict[str, Any],
    shm: str | None = None,
) -> Manifest:
    """The pod template: one container with the job's volumes. With `shm` it trains: configuration and shared memory."""
    volumes, mounts = claims(options)
    if shm:
        volumes += [
            {"name": "config", "configMap": {"name": name}},
            # 64 MB is the default; the snapshots live here and outlive a restart of the container
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        ]
        mounts += [{"name": "config", "mountPath": CONFIG_FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]
    variables = [{"name": key, **value} for key, value in environment.items()]
    variables += [{"name": key, "value": value} for key, value in pairs("--env", options.env)]
    spec: Manifest = {
        "name": container,
        "image": options.image,
        "command": command,
        "args": arguments,
        "env": variables,
        "resources": resources(options),
        "volumeMounts": mounts,
    }
    if options.efa:
        # The adapter registers memory, which needs the lock limit lifted.
        spec["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if shm:
        spec["ports"] = [{"containerPort": PORT, "name": "rendezvous"}]
    whole: Manifest = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [spec],
        "volumes": volumes,
    }
    if options.node_selector:
        whole["nodeSelector"] = dict(pairs("--node-selector", options.node_selector))
    return {"metadata": {"labels": labels(name)}, "spec": whole}


def resources(options: KubernetesOptions) -> Manifest:
    amounts = {
        "cpu": options.cpus,
        "memory": options.mem,
        "nvidia.com/gpu": str(options.gpus_per_node) if options.gpus_per_node else None,
        "vpc.amazonaws.com/efa": str(options.efa) if options.efa else None,
    }
    wanted = {name: amount for name, amount in amounts.items() if amount}
    return {"requests": wanted, "limits": wanted} if wanted else {}


def claims(options: KubernetesOptions) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts of the claims that the user gave."""
    volumes, mounts = [], []
    for claim, path in claim_paths(options).items():
        name = object_name(f"claim-{claim}")  # a claim's name may hold dots, a volume's may not
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": path})
    return volumes, mounts


def claim_paths(options: KubernetesOptions) -> dict[str, str]:
    found = {}
    for pair in options.pvc:
        claim, colon, path = pair.partition(":")
        if not colon or not path.startswith("/") or not all(LABEL.fullmatch(part) for part in claim.split(".")):
            raise UsageError(f"--pvc '{pair}' is not CLAIM:/PATH")
        found[claim] = path
    return found


def check_options(options: KubernetesOptions) -> None:
    """Refuses what the API server would refuse."""
    for flag, amount in (("--cpus", options.cpus), ("--mem", options.mem), ("--shm", options.shm)):
        if amount is not None and not QUANTITY.fullmatch(amount):
            example = "16 or 500m" if flag == "--cpus" else "200Gi or 200G"
            raise UsageError(f"{flag} {amount} is not an amount that Kubernetes knows; write e.g. {example}")
    if not LABEL.fullmatch(options.namespace):
        raise UsageError(
            f"--namespace {options.namespace} is not a name that Kubernetes takes: lower-case letters, digits and dashes"
        )


def require_on_claims(options: KubernetesOptions, paths: dict[str, str]) -> None:
    """Data and results must outlive the pods and be where every pod sees them."""
    mounted = [PurePosixPath(path) for path in claim_paths(options).values()]
    for key, path in paths.items():
        if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounted):
            where = ", ".join(map(str, mounted)) or "no claim is mounted"
            raise UsageError(
                f"{key} = {path} lies on no volume claim ({where}); give --pvc CLAIM:/PATH that contains it"
            )


def indexed(completions: int, backoff: int, template: Manifest) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": completions,
        "backoffLimit": backoff,
        "template": template,
    }


def headless_service(options: KubernetesOptions, name: str) -> Manifest:
    """Gives every pod its own name; published before the pod is ready, because they wait for each other to get ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(name),
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def metadata(options: KubernetesOptions, name: str) -> Manifest:
    return {"name": name, "namespace": options.namespace, "labels": labels(name)}


def labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/instance": name}


def field(path: str) -> Manifest:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def object_name(text: str) -> str:
    """A name that Kubernetes takes for objects, services and host names: it starts with a letter (RFC 1035)."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name:
        raise UsageError(f"'{text}' has no letter or digit to name the Kubernetes job by; give --name")
    if not name[0].isalpha():
        name = f"run-{name}"
    # pods append an index of up to five digits, and a host name has 63 characters
    return name[:50].strip("-")


def to_yaml(manifests: Sequence[Manifest]) -> str:
    import yaml

    class Readable(yaml.SafeDumper):
        """Nothing by reference, and a text of several lines as a block."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Readable.add_representer(str, text)
    return yaml.dump_all(manifests, Dumper=Readable, sort_keys=False, width=120)


def apply(manifests: Sequence[Manifest]) -> str:
    """Hands the manifests to kubectl; returns what it said."""
    if shutil.which("kubectl") is None:
        raise HoldfastError(
            "kubectl is not on this machine; print the manifests with --dry-run and apply them elsewhere"
        )
    done = subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=to_yaml(manifests), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise HoldfastError(f"kubectl apply failed: {done.stderr.strip()}")
    return done.stdout.strip()
