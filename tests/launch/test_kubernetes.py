"""Rendered manifests against the schemas of those who read them, and their commands against our own command line."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from holdfast.command_line.flags import parse
from holdfast.data.preprocess.options import PreprocessOptions
from holdfast.launch.kubernetes import (
    LONGEST_JOBSET,
    LONGEST_NAME,
    LONGEST_PREPROCESSING,
    Manifest,
    TrainingPods,
    check_options,
    object_name,
    preprocess_manifests,
    to_yaml,
    train_manifests,
    volumes_of,
)
from holdfast.launch.options import KubernetesOptions
from holdfast.system.errors import UsageError

KUBERNETES = "1.31"
KINDS = ("job", "jobset", "pytorchjob", "trainjob")
OPTIONS = KubernetesOptions(
    image="registry.example/holdfast:0.1.0",
    nodes=3,
    gpus_per_node=8,
    cpus="90",
    mem="1000Gi",
    efa=16,
    namespace="research",
    pvc=("fsx-claim:/fsx", "home:/home"),
    env=("NCCL_DEBUG=WARN", "EMPTY="),
    node_selector=("node.kubernetes.io/instance-type=p5.48xlarge",),
)
CONFIG = '[model]\nnum_layers = 2\n\n[train]\nsave = "/fsx/run: one"\n'

# The fields of the training operator's PyTorchJob (kubeflow.org/v1) that we write; the pod template is checked as a Pod's.
PYTORCH_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs"],
            "additionalProperties": False,
            "properties": {
                "nprocPerNode": {"type": "string"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "backoffLimit": {"type": "integer"},
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "ttlSecondsAfterFinished": {"type": "integer"},
                        "suspend": {"type": "boolean"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["Master"],
                    "properties": {role: {"$ref": "#/$defs/replica"} for role in ("Master", "Worker")},
                },
            },
        },
    },
    "$defs": {
        "replica": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                "template": {"type": "object"},
            },
        }
    },
}


def render(**changes: Any) -> list[Manifest]:
    """Through YAML and back: what kubectl would read."""
    options = KubernetesOptions(**{**vars(OPTIONS), **changes})
    text = to_yaml(train_manifests(TrainingPods(options, "run-one", CONFIG, nproc_per_node=8, shm="64Gi")))
    return list(yaml.safe_load_all(text))


def pod_templates(value: Any) -> Iterator[Manifest]:
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from pod_templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_templates(inner)


def assert_kept(given: Any, kept: Any, path: str = "") -> None:
    """Nothing of `given` is missing or changed in `kept`, which may have defaults besides."""
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in kept, f"{path}.{key} is not known"
            assert_kept(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(kept), path
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            assert_kept(one, other, f"{path}[{index}]")
    else:
        assert given == kept, path


def check(manifest: Manifest) -> None:
    """Strictly: an unknown field is an error."""
    # Imported here: they take 2 s of CPU time, in every worker that collects this file.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
    from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

    models = {
        "JobSet": JobsetV1alpha2JobSet,
        "TrainJob": TrainerV1alpha1TrainJob,
        "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
    }
    if manifest["kind"] in models:
        # The official model drops unknown fields: its output must equal its input.
        assert_kept(manifest, models[manifest["kind"]].from_dict(manifest).to_dict())
    elif manifest["kind"] == "PyTorchJob":
        jsonschema.validate(manifest, PYTORCH_JOB)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for template in pod_templates(manifest):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_kind_fits_its_schema(kind: str, nodes: int) -> None:
    for manifest in render(kind=kind, nodes=nodes):
        check(manifest)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("completionMode", "completionmode"),
        lambda text: text.replace("cleanPodPolicy", "cleanPodPolice"),
        lambda text: text.replace("mountPath: /dev/shm", "mountPath:"),
        lambda text: text.replace("numNodes: 3", "numNodes: three"),
    ],
)
def test_the_check_itself_finds_damage(damage: Any) -> None:
    found = 0
    for kind in KINDS:
        for manifest in yaml.safe_load_all(damage(to_yaml(render(kind=kind)))):
            try:
                check(manifest)
            except Exception:
                found += 1
    assert found


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_gpus_and_ranks_agree(kind: str) -> None:
    manifests = render(kind=kind)
    pods = 0
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Job":
            pods += spec["completions"]
            assert spec["parallelism"] == spec["completions"]
        elif manifest["kind"] == "JobSet":
            pods += sum(job["template"]["spec"]["completions"] for job in spec["replicatedJobs"])
        elif manifest["kind"] == "PyTorchJob":
            pods += sum(role["replicas"] for role in spec["pytorchReplicaSpecs"].values())
        elif manifest["kind"] == "TrainJob":
            pods += spec["trainer"]["numNodes"]
    assert pods == 3
    for template in pod_templates(manifests):
        container = template["spec"]["containers"][0]
        limits = container["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("8", "16")
        flags = dict(zip(container["args"][2::2], container["args"][3::2], strict=True))
        assert (flags["--nnodes"], flags["--nproc-per-node"]) == ("3", "8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_restarts_in_place_and_finds_its_snapshots_again(kind: str) -> None:
    manifests = render(kind=kind)
    policies = re.findall(r"restartPolicy: (\w+)", to_yaml(manifests))
    assert policies and set(policies) == {"OnFailure"}
    for template in pod_templates(manifests):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
        assert volumes[mounts["/fsx"]]["persistentVolumeClaim"] == {"claimName": "fsx-claim"}
        assert template["spec"]["terminationGracePeriodSeconds"] >= 60


def test_the_pods_find_the_first_one_by_a_name_that_exists() -> None:
    config, service, job = render(kind="job")
    template = job["spec"]["template"]
    endpoint = template["spec"]["containers"][0]["args"][-1]
    assert endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert config["data"]["config.toml"] == CONFIG


@pytest.mark.parametrize("kind", KINDS)
def test_every_variable_in_a_command_is_defined(kind: str) -> None:
    of_the_operator = {
        "pytorchjob": {"RANK", "MASTER_ADDR", "MASTER_PORT"},
        "trainjob": {"PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"},
    }.get(kind, set())
    for template in pod_templates(render(kind=kind)):
        container = template["spec"]["containers"][0]
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        defined = {variable["name"] for variable in container["env"]}
        assert used and used <= defined | of_the_operator
        assert {"name": "EMPTY", "value": ""} in container["env"]


def test_preprocessing_is_shared_out_and_merged_afterwards() -> None:
    share = ["preprocess", "--input", "/fsx/a.jsonl", "--partitions", "8"]
    manifests = list(yaml.safe_load_all(to_yaml(preprocess_manifests(OPTIONS, "corpus", share, 8))))
    for manifest in manifests:
        check(manifest)
    partitions, merge = manifests[0]["spec"]["replicatedJobs"]
    assert (partitions["template"]["spec"]["completions"], partitions["template"]["spec"]["parallelism"]) == (8, 3)
    assert merge["dependsOn"] == [{"name": "partitions", "status": "Complete"}]


def test_a_single_partition_is_made_by_the_job_that_joins() -> None:
    command = ["preprocess", "--input", "/fsx/a.jsonl", "--output-prefix", "/fsx/out", "--vocab-file", "gpt2"]
    (manifest,) = yaml.safe_load_all(to_yaml(preprocess_manifests(OPTIONS, "corpus", command, 1)))
    check(manifest)
    (job,) = manifest["spec"]["replicatedJobs"]
    assert "dependsOn" not in job
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == command
    parse(PreprocessOptions, "holdfast preprocess", container["args"][1:]).check()


# What the core schema of YAML 1.2 reads as a number (section 10.3.2), and what the library of kubectl reads as a truth value.
NUMBERS = [
    r"[-+]?[0-9]+",
    r"0o[0-7]+",
    r"0x[0-9a-fA-F]+",
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    "[yYnN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|true|True|TRUE|false|False|FALSE",
]
ODD_VALUES = [
    *(
        "1e-4",
        "1E5",
        "1234e5",
        "08",
        "0o17",
        "0X1F",
        "0B1",
        "+.5e3",
        "1_0e3",
        "12",
        "0x1f",
        "y",
        "N",
        "yes",
        "No",
        "on",
    ),
    *(
        "null",
        "~",
        "",
        " ",
        "12:30",
        "2024-01-01",
        "{{ x }}",
        "a: b",
        "- a",
        "#a",
        "%a",
        "@a",
        "*a",
        "&a",
        "!a",
        "|",
        ">",
    ),
    *("it's", 'a "b"', "a\\b", "é", "two\nlines", "trailing \n", "\t", "=", "<<", ".inf", "-.INF", ".nan", "?", ": "),
]


@pytest.mark.parametrize("value", ODD_VALUES)
def test_a_text_stays_a_text_whatever_a_reader_takes_for_a_number(value: str) -> None:
    options = replace(OPTIONS, env=(f"NAME={value}",), node_selector=(f"rev={value}",))
    text = to_yaml(preprocess_manifests(options, "corpus", ["preprocess", "--lang", value], 1))
    spec = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"rev": value}
    assert spec["containers"][0]["env"] == [{"name": "NAME", "value": value}]
    assert spec["containers"][0]["args"][-1] == value
    for token in yaml.scan(text):
        if isinstance(token, yaml.ScalarToken) and token.plain and token.value == value:
            assert not any(re.fullmatch(pattern, value) for pattern in NUMBERS)


@pytest.mark.parametrize("value", ["$(HOME)", "a$$b", "$$(HOME)", "a$b", "$", "$$", "100$ (a)", "$(", "$$$(A)"])
def test_a_dollar_of_the_user_reaches_the_container_unchanged(value: str) -> None:
    options = replace(OPTIONS, env=(f"NAME={value}",))
    (manifest,) = preprocess_manifests(options, "corpus", ["preprocess", "--input", value], 2)
    for job in manifest["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert expanded(container["args"][2]) == value
        assert [expanded(one["value"]) for one in container["env"] if one["name"] == "NAME"] == [value]


def expanded(text: str) -> str:
    """As Kubernetes expands it (third_party/forked/golang/expansion), where every variable is set to `value`."""
    return re.sub(r"\$(?:\$|\((?P<name>[^)]*)\))", lambda found: "$" if found[0] == "$$" else "value", text)


@pytest.mark.parametrize("pvc", [("a:/x", "b:/x/"), ("a:/dev/shm",), ("a:/etc/holdfast/",), ("a:/x:ro",)])
def test_a_claim_has_a_path_of_its_own(pvc: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="a path of its own"):
        check_options(replace(OPTIONS, pvc=pvc), {})


def test_paths_outside_the_volume_claims_are_refused() -> None:
    check_options(OPTIONS, {"save": "/fsx/run", "data_path 1": "/fsx/data/corpus_text_document"})
    with pytest.raises(UsageError, match="/scratch/run is not on a volume claim"):
        check_options(OPTIONS, {"save": "/scratch/run"})
    with pytest.raises(UsageError, match="CLAIM:/PATH"):
        check_options(KubernetesOptions(image="x", pvc=("fsx",)), {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GPT 345M (run)", "gpt-345m-run"),
        ("a" * 50, "a" * 50),
        ("345m", "run-345m"),
        ("2026-11-15", "run-2026-11-15"),
        ("9" * 46, "run-" + "9" * 46),
    ],
)
def test_names_become_what_kubernetes_takes(text: str, name: str) -> None:
    assert object_name(text) == name


def test_long_names_stay_different_and_leave_room_for_what_pods_append() -> None:
    runs = [f"llama-3-8b-lr-3e-4-wd-0.1-warmup-2000-batch-1024-seed-{seed}" for seed in range(3)]
    assert len({object_name(run) for run in runs}) == 3
    assert all(len(object_name(run)) == 50 for run in runs)
    names = {kind: max(runs, key=len) for kind in KINDS}
    for kind, run in names.items():
        name = object_name(run, LONGEST_JOBSET if kind in ("jobset", "trainjob") else LONGEST_NAME)
        # JobSet refuses a job of which a pod's name, with its random ending, has more than 63 characters.
        ending = "-node-0-99999-abcde" if kind in ("jobset", "trainjob") else "-worker-9999"
        assert len(name + ending) <= 63
    assert len(object_name(runs[0], LONGEST_PREPROCESSING) + "-partitions-0-9999-abcde") <= 63


def test_a_name_without_letters_and_digits_is_refused() -> None:
    with pytest.raises(UsageError, match="--name"):
        object_name("...")


def test_claims_whose_names_differ_in_a_dot_are_two_volumes():
    found = volumes_of(KubernetesOptions(image="x", pvc=("a.b:/one", "a-b:/two")))
    assert sorted(found.values()) == [("a-b", "/two"), ("a.b", "/one")]
    assert all("." not in name for name in found)
