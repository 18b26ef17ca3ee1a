"""Mistakes on the command line of a launch are refused at once, with one line of advice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.launch import doctor, images, kubernetes, launched_run, slurm
from holdfast.launch.batch_scripts import train_script
from holdfast.launch.command import check_minimums, launch_kubernetes
from holdfast.launch.options import KubernetesOptions, SlurmOptions, StopOptions
from holdfast.launch.preprocessing_job import preprocessing_job
from holdfast.launch.training_job import training_job
from holdfast.parallel.layout import ParallelLayout
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.journal import Journal
from tests.launch.jobs import training

MODEL = ["gpt_tiny", "--vocab-size", "1000", "--save", "/fsx/runs/tiny"]
DATA = ["--data-path", "/fsx/corpus_text_document"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SlurmOptions(nodes=0), "--nodes 0: give 1 or more"),
        (SlurmOptions(gpus_per_node=-1), "--gpus-per-node -1: give 0 or more"),
        (SlurmOptions(signal_seconds=-5), "--signal-seconds -5: give 1 or more"),
        (SlurmOptions(max_requeues=-1), "--max-requeues -1: give 0 or more"),
        (KubernetesOptions(nodes=-2), "--nodes -2: give 1 or more"),
        (StopOptions(run=Path("run"), timeout=-1.0), "--timeout -1.0: give 0 or more"),
    ],
)
def test_numbers_that_no_job_can_have_are_refused(options: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_minimums(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (KubernetesOptions(mem="200GB"), "--mem 200GB is not a Kubernetes quantity.* 200Gi"),
        (KubernetesOptions(shm="lots"), "--shm lots is not a Kubernetes quantity"),
        (KubernetesOptions(cpus="many"), "--cpus many is not a Kubernetes quantity.* 500m"),
        (KubernetesOptions(namespace="My_Space"), "--namespace My_Space is not a Kubernetes name"),
    ],
)
def test_what_the_api_server_would_refuse_is_refused_here(options: KubernetesOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kubernetes.check_options(options, {})


def test_kubernetes_quantities_are_accepted() -> None:
    for amount in ("16", "0.5", "500m", "200Gi", "200G", "1.5Ti", "64Ki"):
        kubernetes.check_options(KubernetesOptions(cpus=amount, mem=amount, shm=amount, namespace="team-1"), {})


@pytest.mark.parametrize("pair", ["fsx", "fsx:data", ":/fsx", "My_Claim:/fsx"])
def test_a_volume_claim_is_a_name_and_an_absolute_path(pair: str) -> None:
    with pytest.raises(UsageError, match="CLAIM:/PATH"):
        kubernetes.claim_paths(KubernetesOptions(pvc=(pair,)))


def test_a_volume_claim_has_one_path() -> None:
    with pytest.raises(UsageError, match="the claim fsx twice"):
        kubernetes.claim_paths(KubernetesOptions(pvc=("fsx:/fsx", "fsx:/data")))


def test_a_launch_of_nothing_names_what_can_be_launched() -> None:
    with pytest.raises(UsageError, match="nothing to launch; launch one of: train, preprocess"):
        launch_kubernetes(KubernetesOptions())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*MODEL, *DATA, "--nnodes", "4"], "--nnodes is set by the job: give --nodes"),
        ([*MODEL, *DATA, "--node_rank=1"], "--node_rank is set by the job: leave it out"),
        (MODEL, "give the dataset with --data-path"),
    ],
)
def test_training_flags_that_a_job_cannot_use_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        training_job(arguments, 2, 4, shared_files=False)


def test_a_preprocessing_job_has_at_least_one_partition() -> None:
    with pytest.raises(UsageError, match="--partitions 0: give 1 or more"):
        preprocessing_job(["--input", "a", "--output-prefix", "b", "--vocab-file", "c", "--partitions", "0"], 2)


@pytest.mark.parametrize("limit", ["tomorrow", "2:00:00:00", "1-0:0:0:0", ""])
def test_a_time_that_slurm_does_not_know_is_refused(limit: str) -> None:
    with pytest.raises(UsageError, match="not a time in Slurm's format"):
        slurm.seconds_of(limit)


@pytest.mark.parametrize(
    ("limit", "message"), [("5", r"\(5 minutes\).* --signal-seconds 180 or less"), ("1", r"\(1 minute\).*more time$")]
)
def test_a_signal_that_comes_with_the_start_is_refused_with_what_would_fit(limit: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        slurm.check_times(None, limit, 300)


@pytest.mark.parametrize("limit", ["0", "UNLIMITED", "2:00:00"])
def test_more_time_than_the_partition_has_is_refused(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'short* 1:00:00'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(HoldfastError, match="more than the partition allows"):
        slurm.check_times(None, limit, 300)
    slurm.check_times(None, "1:00:00", 300)


@pytest.mark.parametrize(("program", "call"), [("sbatch", "check('#!/bin/bash')"), ("scontrol", "jobs('7')")])
def test_slurm_without_a_controller_is_named_as_that(tmp_path: Path, program: str, call: str) -> None:
    """A stand-in for Slurm's programs on a machine that is not part of the cluster."""
    path = tmp_path / program
    path.write_text(
        "#!/bin/sh\n"
        "echo 'x: error: fetch_config: DNS SRV lookup failed' >&2\n"
        "echo 'x: fatal: Could not establish a configuration source' >&2\n"
        "exit 1\n"
    )
    path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code = f"from holdfast.launch import slurm; slurm.{call}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    line = done.stderr.splitlines()[-1]
    assert "Slurm's controller cannot be reached from this machine" in line
    assert "DNS" not in line


def test_logs_of_jobs_that_printed_nothing_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(launched_run.record_file(tmp_path))
    journal.event("submitted", job="7", script="train.sbatch")
    journal.close()
    launched_run.print_logs(tmp_path, follow=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert "has printed anything yet" in err


def test_logs_as_json_are_one_object_per_line(tmp_path: Path) -> None:
    journal = Journal(launched_run.record_file(tmp_path))
    journal.event("submitted", job="7", script="train.sbatch")
    journal.close()
    (tmp_path / "launch" / "slurm-7.out").write_text('first "line"\nlast, not ended')
    (tmp_path / "launch" / "slurm-6.out").write_text("of an earlier submission\n")
    command = [sys.executable, "-m", "holdfast.cli", "launch", "logs", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"job": "7", "file": "slurm-7.out", "line": 'first "line"'},
        {"job": "7", "file": "slurm-7.out", "line": "last, not ended"},
    ]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_run_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HoldfastError, match="is not a folder; give the run folder"):
        launched_run.submitted(tmp_path / name)


def test_an_image_is_built_from_a_checkout_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a checkout of Holdfast"):
        images.checkout(tmp_path)


def test_doctor_names_a_folder_that_is_a_file_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = doctor.check_folder("run", tmp_path / "file")
    assert (check.verdict, "is not a folder" in check.found) == ("fail", True)
    (check,) = doctor.check_folder("run", tmp_path / "later" / "run")
    assert f"does not exist; checked in {tmp_path}" in check.found


def test_one_is_singular() -> None:
    script = train_script(SlurmOptions(), training(Path("/fsx/run")))
    assert "1 node x 1 rank: 1 rank, tensor 1" in script
    assert "(1 replica × 2 shards)" in ParallelLayout(pipeline=1, replica=1, shard=2, tensor=1).words()
