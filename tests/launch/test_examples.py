"""The files in deploy/ are what the launcher writes today; `python -m tests.launch.test_examples` renews them."""

from pathlib import Path

import pytest
import yaml

from holdfast.launch.batch_scripts import preprocess_scripts, train_script
from holdfast.launch.kubernetes import TrainingPods, preprocess_manifests, to_yaml, train_manifests
from holdfast.launch.options import KubernetesOptions, SlurmOptions
from holdfast.system.atomic_files import publish_text
from tests.launch.conftest import Lab
from tests.launch.jobs import preprocessing, training
from tests.launch.test_kubernetes import KINDS, check

DEPLOY = Path(__file__).parents[2] / "deploy"
RUN = Path("/fsx/runs/345m")
CONFIG = """\
[model]
num_layers = 24
hidden_size = 1024
num_attention_heads = 16
vocab_size = 50257

[data]
data_path = ["/fsx/data/corpus_text_document"]
seq_length = 1024

[train]
train_iters = 500000
micro_batch_size = 4
global_batch_size = 512
bf16 = true
save = "/fsx/runs/345m"
"""
PREPROCESS = [
    "preprocess",
    "--input",
    "/fsx/raw/corpus.jsonl",
    "--output-prefix",
    "/fsx/data/corpus",
    "--vocab-file",
    "gpt2",
]


def slurm_examples() -> dict[str, str]:
    options = SlurmOptions(nodes=4, container_image="/apps/holdfast.sqsh", container_mounts="/fsx:/fsx", exclusive=True)
    gpus = SlurmOptions(**{**vars(options), "gpus_per_node": 8, "time": "12:00:00"})
    train = training(RUN, nodes=4, ranks=8, iterations=500000, vocab_file="gpt2")
    share = preprocessing(Path("/fsx/data/corpus"), [*PREPROCESS, "--append-eod", "--partitions", "16"], 16)
    scripts = {"train.sbatch": train_script(gpus, train), **preprocess_scripts(options, share)}
    return {f"slurm/{name}": text for name, text in scripts.items()}


def kubernetes_examples() -> dict[str, str]:
    options = KubernetesOptions(
        image="registry.example/holdfast:0.1.0", nodes=4, gpus_per_node=8, efa=16, pvc=("fsx-claim:/fsx",)
    )
    found = {}
    for kind in KINDS:
        chosen = KubernetesOptions(**{**vars(options), "kind": kind})
        found[f"kubernetes/train-{kind}.yaml"] = to_yaml(
            train_manifests(TrainingPods(chosen, "gpt-345m", CONFIG, 8, "14Gi"))
        )
    small = KubernetesOptions(**{**vars(options), "gpus_per_node": 0, "efa": 0, "cpus": "16"})
    command = [*PREPROCESS, "--append-eod", "--partitions", "16"]
    found["kubernetes/preprocess.yaml"] = to_yaml(preprocess_manifests(small, "corpus", command, 16))
    return found


def test_the_examples_are_what_the_launcher_writes() -> None:
    for name, text in {**slurm_examples(), **kubernetes_examples()}.items():
        assert (DEPLOY / name).read_text() == text, f"{name} is out of date: python -m tests.launch.test_examples"


def test_kubernetes_examples_fit_their_schemas() -> None:
    for name in kubernetes_examples():
        for manifest in yaml.safe_load_all((DEPLOY / name).read_text()):
            check(manifest)


@pytest.mark.slurm
def test_slurm_takes_the_examples(lab: Lab) -> None:
    if not lab.has_pyxis:
        pytest.skip("the Pyxis stand-in could not be compiled here (gcc or spank.h is missing)")
    for name in slurm_examples():
        asked = lab.run("sbatch", "--test-only", DEPLOY / name, check=False)
        assert asked.returncode == 0, f"{name}: {asked.stderr}"


if __name__ == "__main__":
    for name, text in {**slurm_examples(), **kubernetes_examples()}.items():
        publish_text(DEPLOY / name, text)
