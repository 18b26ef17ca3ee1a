"""The batch files: bash accepts them, Slurm accepts them, and the container flags arrive where Pyxis would read them."""

import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest

from holdfast.config import all_keys
from holdfast.launch.batch_scripts import launch_folder, preprocess_scripts, train_script
from holdfast.launch.containers import with_container
from holdfast.launch.options import SlurmOptions
from holdfast.system.errors import UsageError
from tests.launch.conftest import Lab, read_json_lines
from tests.launch.jobs import preprocessing, training

EVERY_FLAG = SlurmOptions(
    nodes=2,
    gpus_per_node=2,
    cpus_per_task=2,
    mem="1G",
    partition="short",
    account="physics",
    qos="normal",
    time="0:10:00",
    exclusive=True,
    constraint=None,
    env=("GREETING=it's here", "EMPTY="),
    prolog=("export FROM_PROLOG=1",),
    sbatch=("--comment=a run of many", "--nice=10"),
    job_name="every flag",
    signal_seconds=60,
)


def write(run: Path, name: str, text: str) -> Path:
    path = launch_folder(run) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def scripts(options: SlurmOptions, run: Path) -> dict[str, str]:
    share = preprocessing(run, ["preprocess", "--input", "a b.jsonl", "--partitions", "4"], 4)
    train = train_script(options, training(run, vocab_file="gpt2/vocab"))
    return {"train.sbatch": train, **preprocess_scripts(options, share)}


@pytest.mark.parametrize(
    "options", [SlurmOptions(), EVERY_FLAG, replace(EVERY_FLAG, container_image="/images/a b.sqsh")]
)
def test_bash_accepts_every_file_even_with_odd_names(tmp_path: Path, options: SlurmOptions) -> None:
    for name, text in scripts(options, tmp_path / "it's a 'run'").items():
        checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0, f"{name}: {checked.stderr}\n{text}"


def test_a_requeued_job_keeps_its_output_and_is_warned_before_the_limit(tmp_path: Path) -> None:
    lines = train_script(EVERY_FLAG, training(tmp_path)).splitlines()
    for line in ("--open-mode=append", "--requeue", "--signal=B:USR1@60"):
        assert f"#SBATCH {line}" in lines
    assert "--signal" not in train_script(replace(EVERY_FLAG, requeue=False), training(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (SlurmOptions(env=("NO_VALUE",)), "NAME=VALUE"),
        (SlurmOptions(env=("$(reboot)=1",)), "is not a valid variable name"),
        (SlurmOptions(sbatch=("mail me",)), "#SBATCH"),
        (SlurmOptions(sbatch=("--comment=x\nrm -rf /",)), "#SBATCH"),
        (SlurmOptions(env=("é=1",)), "is not a valid variable name"),
        (SlurmOptions(array="0-3"), "preprocess"),
    ],
)
def test_what_would_break_the_file_is_refused(tmp_path: Path, options: SlurmOptions, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        train_script(options, training(tmp_path))


def test_no_flag_of_the_job_hides_one_of_training() -> None:
    shared = {field.name for field in fields(SlurmOptions)} & set(all_keys())
    assert shared == set()


@pytest.mark.slurm
def test_slurm_accepts_every_file_with_every_flag(lab: Lab, shared: Path) -> None:
    images = [None, "/images/holdfast.sqsh"] if lab.has_pyxis else [None]
    for image in images:
        run = shared / f"run {image is None}"
        options = replace(EVERY_FLAG, container_image=image, container_mounts=image and f"{shared}:{shared}")
        for name, text in scripts(options, run).items():
            path = write(run, name, text)
            asked = lab.run("sbatch", "--test-only", path, check=False)
            assert asked.returncode == 0, asked.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("name", ["it's", 'say "a"', "50%j 100%%", "été #1", "$HOME `id`", "x,y:z=1"])
def test_a_job_of_an_odd_name_has_its_name_and_writes_where_logs_look(lab: Lab, shared: Path, name: str) -> None:
    job = preprocessing(shared / name, ["--version"], 1)
    options = SlurmOptions(partition="short", sbatch=(f"--comment={name}",))
    (script,) = preprocess_scripts(options, job).values()
    number = lab.run("sbatch", "--parsable", write(job.run, "merge.sbatch", script), cwd=shared).stdout.strip()
    lab.wait_for_end(number)
    assert (launch_folder(job.run) / f"slurm-{number}.out").read_text().startswith("holdfast")
    shown = lab.run("squeue", "-h", "--states=all", "-j", number, "-o", "%j|%k").stdout
    assert shown == f"holdfast-{job.run.name}|{name}\n"


def test_the_record_of_a_run_with_quotes_in_its_name_is_json(tmp_path: Path) -> None:
    run = tmp_path / 'say "a"'
    launch_folder(run).mkdir(parents=True)
    text = train_script(SlurmOptions(), training(run))
    functions = text[text.index("RUN=") : text.index("made_progress()")]
    subprocess.run(["bash", "-c", f'{functions}\nrecord stopped "resume $RUN"'], check=True, env={"SLURM_JOB_ID": "7"})
    (record,) = read_json_lines(launch_folder(run) / "jobs.jsonl")
    assert (record["job"], record["detail"]) == ("7", f"resume {run}")


def test_a_backslash_in_the_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds a backslash"):
        train_script(SlurmOptions(), training(tmp_path / "a\\b"))


def test_an_image_in_the_working_folder_gets_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch file is submitted again from anywhere."""
    (tmp_path / "holdfast.sqsh").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_PATH", raising=False)
    options = with_container(SlurmOptions(container_image="./holdfast.sqsh"), {"save": "/runs/a"})
    assert (options.container_image, options.container_mounts) == (f"{tmp_path}/holdfast.sqsh", "/runs/a:/runs/a")


@pytest.mark.slurm
def test_environment_prolog_and_container_reach_every_node(lab: Lab, shared: Path) -> None:
    """The step of an array task, with `env` in the place of `holdfast`, so that what arrives can be read."""
    if not lab.has_pyxis:
        pytest.skip("the Pyxis stand-in could not be compiled here (gcc or spank.h is missing)")
    options = replace(
        EVERY_FLAG, qos=None, account=None, container_image="/images/a.sqsh", container_mounts="/data:/data"
    )
    job = preprocessing(shared / "corpus", ["--null"], 2)
    text = preprocess_scripts(options, job)["preprocess.sbatch"].replace(" holdfast --null", " env --null")
    text = text.replace(' --partition-index "$SLURM_ARRAY_TASK_ID"', "")
    number = lab.run("sbatch", "--parsable", write(job.run, "show.sbatch", text)).stdout.strip()
    lab.wait_for_end(number)
    for task in ("0", "1"):
        output = (launch_folder(job.run) / f"slurm-{number}_{task}.out").read_text()
        found = dict(entry.partition("=")[::2] for entry in output.split("\0"))
        assert found["GREETING"] == "it's here"
        assert found["EMPTY"] == ""
        assert found["FROM_PROLOG"] == "1"
        assert found["PYXIS_STUB_CONTAINER_IMAGE"] == "/images/a.sqsh"
        assert found["PYXIS_STUB_CONTAINER_MOUNTS"] == "/data:/data"
        assert found["PYXIS_STUB_NO_CONTAINER_MOUNT_HOME"] == "1"
        assert found["SLURM_CPUS_PER_TASK"] == "2"
        assert found["SLURM_JOB_PARTITION"] == "short"
        assert found["SLURM_ARRAY_TASK_ID"] == task
        assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
