"""What cannot work is refused before anything is submitted, with the reason."""

from pathlib import Path

import pytest

from tests.corpus import VOCABULARY, write_dataset
from tests.launch.conftest import Lab

pytestmark = pytest.mark.slurm


@pytest.fixture
def train(lab: Lab, shared: Path) -> list[str | Path]:
    sizes = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"]
    batches = [
        "--train-iters",
        "5",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "4",
        "--vocab-size",
        str(VOCABULARY),
    ]
    data = write_dataset(shared / "corpus", documents=20)
    return [
        "train",
        *sizes,
        *batches,
        "--data-path",
        data,
        "--save",
        shared / "run",
        "--nproc-per-node",
        "2",
        "--nodes",
        "2",
    ]


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (["--tensor-model-parallel-size", "3"], 1, "cannot be divided by"),
        (["--num-attention-heads", "3"], 1, "hidden_size 32 is not divisible by num_attention_heads 3"),
        (["--global-batch-size", "6"], 1, "global_batch_size 6 is not divisible"),
        (["--pipeline-model-parallel-size", "4"], 1, "cannot be divided into 4 pipeline stages"),
        (["--data-path", "/nowhere/corpus"], 1, "/nowhere/corpus"),
        (["--data-path", "$UNSET/corpus"], 2, "an environment variable in this path is not set"),
        (["--partition", "gpu"], 1, "(there are: main, short)"),
        (["--nodes", "9", "--global-batch-size", "18"], 1, "Slurm would refuse this job"),
        (["--partition", "short", "--time", "2:00:00"], 1, "more than the partition allows (60 minutes)"),
        (["--time", "5:00"], 2, "leaves no time to train of --time 5:00"),
        (["--time", "soon"], 2, "not a time in Slurm's format"),
        (["--container-mounts", "/a:/a"], 2, "needs --container-image"),
        (["--container-image", "/nowhere.sqsh"], 1, "no such image"),
        (["--learning-rate", "3"], 2, "--learning-rate"),
        (["--print-config"], 2, "is for `holdfast train` itself"),
    ],
)
def test_a_job_that_cannot_work_is_not_submitted(
    lab: Lab, shared: Path, train: list[str | Path], flags: list[str], code: int, reason: str
) -> None:
    known = lab.run("scontrol", "show", "job", "-o").stdout
    refused = lab.holdfast("launch", "slurm", *train, *flags, check=False)
    message = " ".join(refused.stderr.replace("│", " ").split())
    assert (refused.returncode, reason in message) == (code, True), refused.stderr
    assert "Traceback" not in refused.stderr
    assert lab.run("scontrol", "show", "job", "-o").stdout == known
    assert not (shared / "run").exists()


def test_paths_that_the_container_does_not_see_are_refused(lab: Lab, shared: Path, train: list[str | Path]) -> None:
    image = shared / "holdfast.sqsh"
    image.touch()
    refused = lab.holdfast(
        "launch", "slurm", *train, "--container-mounts", "/elsewhere:/elsewhere", check=False, IMAGE=str(image)
    )
    assert refused.returncode == 2
    assert "is not mounted in the container" in refused.stderr


def test_image_and_mounts_come_from_the_environment(lab: Lab, shared: Path, train: list[str | Path]) -> None:
    (shared / "holdfast.sqsh").touch()
    environment = {"APPS_PATH": str(shared), "DATA_PATH": str(shared)}
    arguments = ["$DATA_PATH/corpus" if part == shared / "corpus" else part for part in train]
    shown = lab.holdfast("launch", "slurm", *arguments, "--dry-run", **environment).stdout
    assert f"--container-image={shared}/holdfast.sqsh" in shown
    assert f"--container-mounts={shared}:{shared}" in shown
    other = shared / "other.sqsh"
    other.touch()
    shown = lab.holdfast("launch", "slurm", *arguments, "--dry-run", **environment, IMAGE=str(other)).stdout
    assert f"--container-image={other}" in shown


@pytest.mark.parametrize("verb", [["status"], ["logs"], ["stop"], ["resume"]])
def test_a_folder_that_was_never_launched_is_refused(lab: Lab, tmp_path: Path, verb: list[str]) -> None:
    refused = lab.holdfast("launch", *verb, tmp_path, check=False)
    assert refused.returncode == 1
    assert "was not launched from here" in refused.stderr


def test_an_unknown_verb_is_named(lab: Lab) -> None:
    refused = lab.holdfast("launch", "slurm", "dance", check=False)
    assert (refused.returncode, "cannot launch 'dance'" in refused.stderr) == (2, True)
