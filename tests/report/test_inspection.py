"""`holdfast inspect RUN` describes a run, whole or damaged, in words and as JSON."""

import json
import os
import shutil

import pytest

from holdfast import cli
from holdfast.checkpoint.manifest import Manifest, ShardFile, chunk_checksum, write_manifest
from holdfast.inspection import inspect_path
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from holdfast.system.run_claim import claim_run
from tests.report.runs import record, write_run


@pytest.fixture
def folder(tmp_path):
    """A run with one checkpoint whose checksums are right: two tensors, of which one belongs to the model."""
    folder = write_run(tmp_path / "first")
    shutil.rmtree(folder / "checkpoints" / "step-00000100")
    step = folder / "checkpoints" / "step-00000200"
    content = b"x" * 1000
    (step / "shard-00000-of-00001.safetensors").write_bytes(content)
    shard = ShardFile("shard-00000-of-00001.safetensors", 0, len(content), [chunk_checksum(content)], [])
    tensors = {"model.weight": ("F32", [10, 20]), "optimizer.weight": ("F32", [10, 20])}
    write_manifest(step, Manifest(200, 2, "plan", tensors, [shard]))
    return folder


def text(folder):
    kind, description = inspect_path(folder)
    assert kind == "run"
    return " ".join("\n".join(description.lines).split())


def test_a_run_is_described_in_words(folder):
    output = text(folder)
    for expected in (
        "state finished", "GPT, 12 layers × 768, 12 heads", "vocabulary of 4,096; 200 parameters, fp32",
        "split 969,30,1, sequences of 1,024 tokens", "tokenizer GPT2BPETokenizer", "step 200 of 200 (100%), 1,638,400 tokens",
        "loss first", "validation first", "best", "tokens/s", "ms per step", "MFU 41.0%", "restarts 1",
        "rank 1 was killed by SIGKILL at step 120; resumed from memory 3.5 s later, 2 steps repeated",
        "memory: this host holds nothing of this run", "disk: 1 checkpoint", "step 200 1.0 KB 2 checksums match",
        f"holdfast generate {folder}", f"holdfast convert {folder}", f"holdfast report {folder}",
    ):  # fmt: skip
        assert expected in output, expected
    _, description = inspect_path(folder)
    assert all(len(line) <= 80 for line in description.lines if str(folder) not in line) and not description.problems


def test_json_has_the_same_facts(folder, capsys):
    cli.run(["inspect", str(folder), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["state"], facts["running"]) == ("run", "finished", False)
    assert (facts["step"], facts["train_iters"], facts["restarts"], facts["failures"]) == (200, 200, 1, 1)
    assert facts["model"]["parameters"] == 200 and facts["data"]["seq_length"] == 1024
    assert facts["loss"]["first"]["iteration"] == 1 and facts["validation_loss"]["last"]["iteration"] == 200
    assert facts["loss"]["best"]["value"] <= facts["loss"]["last"]["value"]
    assert (
        facts["last_failure"]["rank"] == 1
        and facts["events"]["failure"] == 2
        and facts["last_event"]["event"] == "finished"
    )
    assert facts["checkpoints"][0]["verified"] is True and facts["memory"] is None and facts["problems"] == []


def test_a_flipped_bit_on_disk_is_found_and_the_exit_code_is_1(folder, capsys):
    shard = folder / "checkpoints" / "step-00000200" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(b"y" + shard.read_bytes()[1:])
    with pytest.raises(SystemExit) as caught:
        cli.run(["inspect", str(folder)])
    output = capsys.readouterr()
    assert caught.value.code == 1 and "DAMAGED" in output.out and "checksum" in output.err
    assert "to continue from step 0, because no usable state is held" in output.out


def test_a_run_that_never_reached_step_1_names_the_cause(tmp_path):
    folder = write_run(tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    for name in ("metrics.jsonl", "events.jsonl"):
        (folder / name).unlink()
    assert "state never started" in text(folder) and "never reached step 1 of 200" in text(folder)
    assert "parameters, fp32" in text(folder) and "unknown number" not in text(folder)
    journal = Journal(folder / "events.jsonl")
    journal.event("started", world=2)
    assert "state running on another host, or interrupted" in text(folder)
    os.utime(folder / "events.jsonl", (1e9, 1e9))
    assert "state interrupted" in text(folder)
    journal.event("failure", kind="exit", rank=0, cause="OutOfMemoryError: too small", exit_code=1)
    output = text(folder)
    assert "state failed" in output and "rank 0 failed: OutOfMemoryError: too small; the run did not continue" in output
    assert "correct the cause of the failure to continue from step 0" in output
    assert f"holdfast train {folder}/config.toml" in output
    journal.event("started", world=2)
    journal.event("failure", kind="exit", rank=0, cause="killed by SIGTERM", exit_code=-15)
    assert "what to do next to continue from step 0" in text(folder)  # nothing to correct


def test_a_run_that_a_live_process_has_claimed_is_running(folder, capsys):
    Journal(folder / "events.jsonl").event("started", world=2)
    os.utime(folder / "events.jsonl", (1e9, 1e9))
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    with claim_run(folder):
        assert f"state running: 0 ranks on this host, claimed by process {os.getpid()}" in text(folder)
        cli.run(["snapshots", str(folder)])
        output = capsys.readouterr().out
        assert "the run is training" in output and f"holdfast persist {folder} --stop" in output
    assert "state interrupted" in text(folder)


def test_a_loss_that_is_not_finite_is_mentioned(tmp_path):
    folder = write_run(tmp_path / "run")
    journal = Journal(folder / "metrics.jsonl")
    for iteration in (201, 202):
        journal.write(record(iteration, loss=float("nan")))
    assert "the loss has not been a finite number since iteration 201" in text(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", b"[model\n", "the configuration cannot be read"),
        ("config.toml", b"\xff\xfe", "the configuration cannot be read"),
        ("metrics.jsonl", b"\x00\x01\n\xff\n", "metrics.jsonl is damaged: none of its 2 lines is a record"),
        ("events.jsonl", b"[]\n", "events.jsonl is damaged"),
        ("checkpoints/latest", b"step-00000999\n", "which does not exist"),
        ("checkpoints/step-00000200/MANIFEST.json", b"{", "MANIFEST.json is damaged"),
        ("metrics.jsonl", "folder", "metrics.jsonl is not a regular file"),
        ("config.toml", "fifo", "config.toml is not a regular file"),
        ("events.jsonl", "fifo", "events.jsonl is not a regular file"),
        ("checkpoints/step-00000200/MANIFEST.json", "fifo", "has no MANIFEST.json"),
        ("events.jsonl", "loop", "events.jsonl is not a regular file"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_described(folder, name, content, message):
    path = folder / name
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(content)
    kind, description = inspect_path(folder)
    assert kind == "run" and any(message in problem for problem in description.problems), description.problems
    assert "disk: 1 checkpoint" in "\n".join(description.lines)


def test_a_damaged_configuration_is_to_be_repaired_before_the_run_continues(folder):
    (folder / "config.toml").write_text("[model")
    Journal(folder / "events.jsonl").event("started", world=2)
    assert "repair config.toml, which cannot be read to continue from step 200 on disk" in text(folder)


def test_a_refusal_counts_until_something_worked(folder):
    journal = Journal(folder / "events.jsonl")
    journal.event("refused", reason="No space left on device", tries=1)
    assert "No space left on device (try 1)" in text(folder)
    journal.event("persisted", step=200, path="checkpoints/step-00000200", reason="save", bytes=5, seconds=0.1)
    assert "No space left" not in text(folder)


def test_torn_lines_are_noted_and_no_problem(folder):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": 20')
    _, description = inspect_path(folder)
    assert not description.problems and "1 torn line of metrics.jsonl skipped" in description.facts["notes"]


def test_a_folder_of_runs_names_them(folder):
    with pytest.raises(HoldfastError, match="is a folder of runs; inspect one of them: .*first"):
        inspect_path(folder.parent)


def test_snapshots_of_a_run_that_is_only_on_disk(folder, tmp_path, capsys, monkeypatch):
    memory = ["--snapshot-dir", str(tmp_path)]
    cli.run(["snapshots", str(folder), *memory])
    output = capsys.readouterr().out
    assert "memory: this host holds nothing of this run" in output and "step 200    1.0 KB" in output
    assert "the run is finished" in output and "holdfast generate" in output
    journal = Journal(folder / "events.jsonl")
    journal.event("started", world=2)
    cli.run(["snapshots", str(folder), *memory, "--verify"])
    output = capsys.readouterr().out
    assert (
        "checksums match" in output
        and f"to continue from step 200 on disk:\n    holdfast train {folder}/config.toml" in output
    )
    (folder / "config.toml").unlink()
    cli.run(["snapshots", str(folder), *memory])
    assert "start the same training script again; it continues from step 200 on disk" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        HoldfastError, match=r"there is no run secnod\. Runs in memory: none\. Run folders near it: .*first"
    ):
        cli.run(["snapshots", "secnod", *memory])
    with pytest.raises(HoldfastError, match="is a folder but not a run.*first"):
        cli.run(["snapshots", str(tmp_path), *memory])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for verb in ("snapshots", "persist"):
        with pytest.raises(HoldfastError, match="leads to itself"):
            cli.run([verb, str(tmp_path / "loop"), *memory])
