"""`holdfast launch kubernetes` end to end: what it prints parses with our own command line, what it applies kubectl takes."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.command_line import flags as command_line
from holdfast.data.preprocess.options import PreprocessOptions
from holdfast.launch.options import DaskOptions, KubernetesOptions, SlurmOptions
from holdfast.train.command import TrainOptions, parse
from tests.launch.test_kubernetes import KINDS, check, pod_templates

MODEL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--vocab-size",
    "1000",
    "--seq-length",
    "64",
]
TRAIN = [
    "train",
    *MODEL,
    "--train-iters",
    "10",
    "--data-path",
    "/fsx/data/corpus_text_document",
    "--save",
    "/fsx/runs/tiny",
]
CLUSTER = ["--image", "registry.example/holdfast:1", "--pvc", "fsx-claim:/fsx", "--nodes", "2", "--gpus-per-node", "4"]


def holdfast(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


def rendered(*arguments: str) -> list[dict[str, Any]]:
    done = holdfast("launch", "kubernetes", *arguments)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_of_every_pod_is_one_that_we_understand(kind: str, tmp_path: Path) -> None:
    manifests = rendered(*TRAIN, *CLUSTER, "--kind", kind, "--tensor-model-parallel-size", "2")
    for manifest in manifests:
        check(manifest)
    mounted = tmp_path / "config.toml"
    mounted.write_text(next(m["data"]["config.toml"] for m in manifests if m["kind"] == "ConfigMap"))
    for template in pod_templates(manifests):
        container = template["spec"]["containers"][0]
        assert container["command"][-1] == "holdfast"
        verb, config, *flags = container["args"]
        assert (verb, config) == ("train", "/etc/holdfast/config.toml")
        flags = ["1" if flag.startswith("$(") and flag.endswith("RANK)") else flag for flag in flags]
        parsed = parse([str(mounted), *flags]).config
        assert (parsed.parallel.nnodes, parsed.parallel.nproc_per_node, parsed.parallel.node_rank) == (2, 4, 1)
        assert parsed.parallel.tensor_model_parallel_size == 2
        assert parsed.model.hidden_size == 64
        assert parsed.train.save == "/fsx/runs/tiny"


@pytest.mark.parametrize("given", [[], ["--force"]])
def test_the_pods_get_the_flags_that_the_configuration_does_not_hold(given: list[str], tmp_path: Path) -> None:
    """--force, and that the user chose --vocab-size: without it, the pods would take the tokenizer's size."""
    manifests = rendered(*TRAIN, *CLUSTER, *given)
    mounted = tmp_path / "config.toml"
    mounted.write_text(manifests[0]["data"]["config.toml"])
    for template in pod_templates(manifests):
        flags = template["spec"]["containers"][0]["args"][2:]
        options = parse([str(mounted), *(flag.replace("$(NODE_RANK)", "1") for flag in flags)])
        assert (options.force, options.vocab_size_given) == (bool(given), True)
        assert options.config.model.vocab_size == 1000


def test_the_restarts_of_ranks_and_of_pods_have_their_own_flags(tmp_path: Path) -> None:
    manifests = rendered(*TRAIN, *CLUSTER, "--max-restarts", "7", "--backoff-limit", "5")
    mounted = tmp_path / "config.toml"
    mounted.write_text(manifests[0]["data"]["config.toml"])
    assert parse([str(mounted)]).config.parallel.max_restarts == 7
    assert manifests[-1]["spec"]["backoffLimit"] == 5


@pytest.mark.parametrize("launcher", [SlurmOptions, KubernetesOptions, DaskOptions])
@pytest.mark.parametrize("verb", [TrainOptions, PreprocessOptions])
def test_no_flag_of_a_job_hides_one_of_its_verb(launcher: type, verb: type) -> None:
    own, of_verb = ({flag.option for flag in command_line.flags_of(one) if flag.named} for one in (launcher, verb))
    assert own & of_verb <= {"--dry-run", "--json"}  # these mean the job


def test_a_run_whose_name_starts_with_a_digit_gets_objects_that_kubernetes_takes() -> None:
    """The command of docs/clusters.md, whose run is called 345m."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    command = page[page.index("holdfast launch kubernetes train") :].split("\n```")[0].replace("\\\n", " ")
    manifests = rendered(*command.split()[3:])
    assert {manifest["metadata"]["name"] for manifest in manifests} == {"run-345m"}
    for manifest in manifests:
        check(manifest)


@pytest.mark.parametrize("given", [["--image", "mine:1"], ["--image=mine:1"]])
def test_the_image_that_was_given_wins_over_the_environment(given: list[str]) -> None:
    cluster = [*CLUSTER[2:], *given]
    done = holdfast("launch", "kubernetes", *TRAIN, *cluster, IMAGE="environment:1")
    assert done.returncode == 0, done.stderr
    assert "image: mine:1" in done.stdout
    assert "environment:1" not in done.stdout


def test_the_image_comes_from_the_environment_or_is_asked_for() -> None:
    assert (
        "image: environment:1" in holdfast("launch", "kubernetes", *TRAIN, *CLUSTER[2:], IMAGE="environment:1").stdout
    )
    missing = holdfast("launch", "kubernetes", *TRAIN, *CLUSTER[2:], IMAGE="")
    assert (missing.returncode, "--image" in missing.stderr) == (2, True)


def test_the_commands_of_preprocessing_are_ones_that_we_understand() -> None:
    files = [
        "--input",
        "/fsx/a.jsonl",
        "/fsx/b.jsonl",
        "--output-prefix",
        "/fsx/corpus",
        "--vocab-file",
        "/fsx/vocab.json",
    ]
    manifests = rendered("preprocess", *files, "--append-eod", "--partitions", "6", *CLUSTER)
    check(manifests[0])
    share, merge = (template["spec"]["containers"][0] for template in pod_templates(manifests))
    for container, index in ((share, 1), (merge, None)):
        flags = [flag.replace("$(PARTITION)", "1") for flag in container["args"]]
        values = vars(command_line.parse(PreprocessOptions, "test", flags[1:]))
        assert (flags[0], values["partition_index"], values["partitions"]) == ("preprocess", index, 6)
        assert (values["input"], values["append_eod"]) == (("/fsx/a.jsonl", "/fsx/b.jsonl"), True)


def test_json_gives_the_manifests_as_one_list() -> None:
    files = ["--input", "/fsx/a.jsonl", "--output-prefix", "/fsx/corpus", "--vocab-file", "/fsx/vocab.json"]
    done = holdfast("launch", "kubernetes", "preprocess", *files, *CLUSTER, "--json")
    assert json.loads(done.stdout) == rendered("preprocess", *files, *CLUSTER)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (3, 0), (1, 1)])
def test_skipped_lines_are_no_failure_to_kubernetes(tmp_path: Path, code: int, seen: int) -> None:
    files = ["--input", "/fsx/a.jsonl", "--output-prefix", "/fsx/corpus", "--vocab-file", "/fsx/vocab.json"]
    container = next(pod_templates(rendered("preprocess", *files, *CLUSTER)))["spec"]["containers"][0]
    program = tmp_path / "holdfast"
    program.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/seen"\nexit {code}\n')
    program.chmod(0o755)
    done = subprocess.run([*container["command"], *container["args"]], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.returncode, (tmp_path / "seen").read_text().split()) == (seen, container["args"])


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        (["--save", "/scratch/run"], 2, "save = /scratch/run is not on a volume claim"),
        (["--tensor-model-parallel-size", "3"], 1, "cannot be divided by"),
        (["--apply", "--dry-run"], 2, "exclude each other"),
        (["--name", "..."], 2, "give --name"),
    ],
)
def test_what_cannot_work_is_refused(changes: list[str], code: int, reason: str) -> None:
    done = holdfast("launch", "kubernetes", *TRAIN, *CLUSTER, *changes)
    assert (done.returncode, reason in done.stderr) == (code, True), done.stderr


@pytest.fixture
def api() -> Iterator[tuple[str, dict[str, Any]]]:
    """As much of an API server as kubectl needs to find out the kinds and create objects."""
    created: dict[str, Any] = {}
    groups = {"v1": [("configmaps", "ConfigMap"), ("services", "Service")], "batch/v1": [("jobs", "Job")]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path == "/api":
                self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
            elif path == "/apis":
                version = {"groupVersion": "batch/v1", "version": "v1"}
                group = {"name": "batch", "versions": [version], "preferredVersion": version}
                self.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})
            elif path in ("/api/v1", "/apis/batch/v1"):
                version = path.removeprefix("/apis/").removeprefix("/api/")
                kinds = [
                    {"name": name, "kind": kind, "namespaced": True, "verbs": ["create", "get", "patch"]}
                    for name, kind in groups[version]
                ]
                self.answer(200, {"kind": "APIResourceList", "groupVersion": version, "resources": kinds})
            elif path == "/openapi/v3":
                roots = ("api/v1", "apis/batch/v1")
                self.answer(200, {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}})
            elif path.startswith("/openapi/v3/"):
                self.answer(200, self.schema(path.removeprefix("/openapi/v3")))
            elif path in created:
                self.answer(200, created[path])
            else:
                self.answer(
                    404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
                )

        def schema(self, root: str) -> dict[str, Any]:
            """Says no more than that the server itself checks the fields."""
            version = root.removeprefix("/apis/").removeprefix("/api/")
            group = version.rpartition("/")[0]
            paths = {}
            for name, kind in groups[version]:
                patch = {
                    "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                }
                paths[f"{root}/namespaces/{{namespace}}/{name}/{{name}}"] = {"patch": patch}
            return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            created[f"{self.path.split('?')[0]}/{body['metadata']['name']}"] = body
            self.answer(201, body)

        def answer(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", created
        server.shutdown()
        thread.join()


def test_apply_creates_the_objects_through_kubectl(api: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on this machine")
    address, created = api
    config = tmp_path / "kubeconfig"
    cluster = {"name": "test", "cluster": {"server": address}}
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    user = {"name": "test", "user": {}}
    settings = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": [user]}
    config.write_text(json.dumps({**settings, "current-context": "test"}))
    arguments = [*TRAIN, *CLUSTER, "--namespace", "research"]
    done = holdfast("launch", "kubernetes", *arguments, "--apply", KUBECONFIG=str(config), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(created) == [
        "/api/v1/namespaces/research/configmaps/tiny",
        "/api/v1/namespaces/research/services/tiny",
        "/apis/batch/v1/namespaces/research/jobs/tiny",
    ]
    expected = {manifest["kind"]: manifest["spec"] for manifest in rendered(*arguments) if "spec" in manifest}
    assert created["/apis/batch/v1/namespaces/research/jobs/tiny"]["spec"] == expected["Job"]
    assert "kubectl logs --follow" in done.stderr
    refused = holdfast(
        "launch", "kubernetes", *arguments, "--apply", KUBECONFIG=str(tmp_path / "none"), HOME=str(tmp_path)
    )
    assert (refused.returncode, "kubectl apply failed" in refused.stderr) == (1, True)
